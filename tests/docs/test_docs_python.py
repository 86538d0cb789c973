"""The programs of the page about Python are real: each is shown, is short, and runs."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from tests.docs.quoted import quotes
from tests.support.checkout import ROOT
from tests.support.commands import run_command
from tests.support.forked import forked_command

PROGRAMS = ROOT / "tests" / "examples" / "python"
SHORT = {"MEGATRON_RUN_SET": "train.steps=4;eval.interval=2;run.threads=1"}


def output(name: str, folder: Path) -> str:
    """What a program prints when the environment makes its runs short."""
    done = run_command((sys.executable, "-W", "error", str(PROGRAMS / name)), folder, variables=SHORT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_shows_every_program_in_at_most_twenty_lines() -> None:
    shown = quotes((ROOT / "docs" / "python.md").read_text(encoding="utf-8"))
    assert set(shown) == {file.relative_to(ROOT).as_posix() for file in PROGRAMS.glob("*.py")}
    assert all(len(code.splitlines()) <= 20 for code in shown.values())


@pytest.mark.nightly
def test_a_run_says_what_it_will_do_and_leaves_its_numbers(tmp_path: Path) -> None:
    printed = output("one_run.py", tmp_path)
    assert "topology: world 1 = tensor 1 x pipeline 1 x data 1" in printed
    first, last = (float(loss) for loss in re.findall(r"^validation loss ([\d.]+) after [24] steps$", printed, re.M))
    assert last < first


def run_program() -> None:
    """What ``python -W error`` does with a program, in a process that has torch loaded."""
    warnings.simplefilter("error")
    runpy.run_path(sys.argv[1], run_name="__main__")


@pytest.mark.multiproc
def test_an_object_handed_in_sees_every_step(tmp_path: Path) -> None:
    program = f"{__name__}:run_program"
    done = forked_command([str(PROGRAMS / "plugin_object.py")], tmp_path, variables=SHORT, program=program)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^4 losses, the last 4\.\d+$", done.stdout, re.M)


@pytest.mark.nightly
def test_a_model_is_evaluated_and_stepped_by_hand(tmp_path: Path) -> None:
    before, after = (
        (float(perplexity), int(tokens))
        for perplexity, tokens in re.findall(
            r": perplexity ([\d.]+) over (\d+) tokens$", output("evaluate.py", tmp_path), re.M
        )
    )
    assert before[1] == after[1] == 16 * 40 - 1
    assert after[0] < before[0] / 2


@pytest.mark.nightly
def test_a_model_is_trained_plotted_and_writes(tmp_path: Path) -> None:
    lines = output("generate.py", tmp_path).splitlines()
    first, last = (float(loss) for loss in re.findall(r"[\d.]+", lines[0].partition(",")[2]))
    assert lines[0].startswith("100 steps")
    assert last < first
    assert "Loss in training" in (tmp_path / "curves.svg").read_text()
    assert "torch.Size([1, 3, 257])" in lines
    assert sum(line.startswith("'hello world. hel") for line in lines) == 2
    assert sum(line.startswith("'a world. hello wor") for line in lines) == 2
