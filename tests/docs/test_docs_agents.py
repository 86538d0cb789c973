"""AGENTS.md is short, and names what is there: targets, tests, commands, paths, the policy of each rule."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from tests.docs.consoles import run
from tests.support.checkout import ROOT

PAGE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
POLICIES = {file.stem.removeprefix("test_architecture_") for file in (ROOT / "tests/architecture").glob("test_*.py")}
#: A root entry of the tree and what follows, in code; words in capitals stand for any.
PATH = re.compile(r"`((?:\.github|[a-z]+)/[\w./-]+)`")


def typed(page: str) -> list[list[str]]:
    """The words of each command in the blocks of ``page``."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def wrong(page: str) -> Iterator[str]:
    """What ``page`` names that is not there, or does not work."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for program, *words in [*typed(page), *map(shlex.split, re.findall(r"`(make [^`]+)`", page))]:
        if program == "make":
            yield from (f"make {word}" for word in words if word not in targets)
        elif program == ".venv/bin/pytest":
            yield from (word for word in words if "/" in word and not any(with_tests(ROOT / word, "nightly" in words)))
        elif (done := run(shlex.join(["megatron-run", *words, "--dry-run"])))[0] != ExitCode.DONE:
            yield done[1]
    yield from (path for path in PATH.findall(page) if not exists(path))


def with_tests(path: Path, nightly: bool) -> Iterator[Path]:
    """The files of tests at ``path``; of ``nightly`` ones those that have some."""
    for file in (path,) if path.is_file() else path.rglob("test_*.py"):
        if not nightly or "pytest.mark.nightly" in file.read_text(encoding="utf-8"):
            yield file


def exists(path: str) -> bool:
    """Whether ``path``, in which a word in capitals stands for any name, is in the checkout."""
    return any(ROOT.glob(re.sub(r"\b[A-Z]+\b", "*", path)))


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= 80
    assert max(map(len, PAGE.splitlines())) <= 130


def test_its_commands_work_and_its_paths_exist() -> None:
    assert len(typed(PAGE)) > 5
    assert not list(wrong(PAGE))


def test_every_policy_stands_beside_its_rule() -> None:
    rows = re.findall(r"^\| .+ \| (`.+`) \|$", PAGE.partition("test_architecture_*.py")[2], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(POLICIES)


@pytest.mark.parametrize(
    "line",
    [
        "```sh\nmake no-such-target\n```",
        "`make no-such-target`",
        "```sh\n.venv/bin/pytest -q tests/no_such_folder\n```",
        "```sh\n.venv/bin/pytest -q -m nightly tests/docs/test_docs_lists.py\n```",
        "```sh\n.venv/bin/megatron-run preset:none\n```",
        "in `core/no_such_package/src`",
        "in `plugins/KIND/NAME/no-such-file`",
    ],
)
def test_what_is_gone_is_found(line: str) -> None:
    assert list(wrong(line))
