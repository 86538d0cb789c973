"""What a page says that a command prints is what it prints; every command on a page works."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.docs.consoles import Shown, console_pages, printed, run, shown
from tests.support.checkout import ROOT
from tests.support.command_tree import every_command

PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in console_pages()}
SHOWN = {f"{name}: {each.command}": each for name, page in PAGES.items() for each in shown(page)}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [block for page in PAGES.values() for kind, block in FENCED.findall(page) if not kind]
COMMANDS = {words[0] for words, _ in every_command()} - {"train"}
TYPED = sorted({line for block in BLOCKS for line in re.findall(r"^megatron-run(?: .*)?$", block, re.MULTILINE)})


def trains(line: str) -> bool:
    first = shlex.split(line, comments=True)[1:2]
    return first != ["--help"] and not set(first) & COMMANDS


@pytest.mark.parametrize("where", SHOWN)
def test_a_command_prints_what_the_page_shows(where: str) -> None:
    output = printed(SHOWN[where].command)
    assert SHOWN[where].agrees(output), output


@pytest.mark.parametrize("line", TYPED)
def test_a_command_can_be_typed_as_it_stands(line: str) -> None:
    """One that would train resolves its configuration instead. Blocks marked ``sh`` need files of the reader's own."""
    shown = re.sub(r"^megatron-run (train )?", "megatron-run config show ", line).replace(" --dry-run", "")
    code, output = run(shown if trains(line) else line)
    assert code == 0, output


@pytest.mark.nightly
@pytest.mark.parametrize("line", [line for line in TYPED if trains(line)])
def test_a_command_that_trains_says_what_it_would_train(line: str) -> None:
    code, output = run(line, "--dry-run")
    assert code == 0, output


def test_other_output_is_found() -> None:
    console = Shown("megatron-run --version", "a\n...\nz\n")
    assert console.agrees("a\nz\n")
    assert console.agrees("a\nb\nc\nz\n")
    assert not console.agrees("a\nb\n")
    assert not console.agrees("b\na\nz\n")
