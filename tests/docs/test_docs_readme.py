"""The front page tells no tales: its commands exist, its plugin trains."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from tests.support.checkout import MEMBERS, ROOT
from tests.support.forked import forked_command

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake (run|test|\w+(?=`))", PAGE))
    assert {"run", "test"} <= named <= targets


def test_make_run_runs_the_command_that_the_page_names() -> None:
    recipe = re.search(r"^run:.*\n\t\.venv/bin/(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe
    assert f"`{recipe[1]}`" in PAGE


def test_pip_installs_everything_or_members_of_the_tree() -> None:
    """The root brings every member, as tests of its wheel show."""
    lines = [shlex.split(line) for line in re.findall(r"^pip install (.*)$", PAGE, re.MULTILINE)]
    assert all((ROOT / "constraints.txt").is_file() and words[:2] == ["-c", "constraints.txt"] for words in lines)
    everything, chosen = (words[2:] for words in lines)
    assert everything == ["."]
    assert set(chosen) < {f"./{member}" for member in MEMBERS}


@pytest.mark.multiproc
def test_the_plugin_in_one_file_trains(tmp_path: Path) -> None:
    (tmp_path / "schedule.py").write_bytes((ROOT / "tests/examples/plugins/schedule.py").read_bytes())
    words = ("preset:tiny", "--plugin", "schedule=./schedule.py", "--set", "parallel.pipeline=2")
    done = forked_command((*words, "--set", "train.steps=3", "--set", "run.threads=1"), tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "finished: 3 steps" in done.stdout
