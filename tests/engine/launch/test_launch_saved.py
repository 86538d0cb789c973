"""What a run that has ended says of its saved steps, and what to type to go on from them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_run.errors import DataError
from megatron_run_engine.launch.saved import how_to_go_on, interrupted, last_line, last_saved


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with three saved steps, in a place whose name a shell would cut."""
    for step in (5, 20, 10):
        (tmp_path / "my runs" / "checkpoints" / f"step{step}").mkdir(parents=True)
    return tmp_path / "my runs"


def test_the_newest_step_counts_and_none_where_there_is_none(run: Path) -> None:
    assert (last_saved(run), last_saved(run.parent), last_saved(None)) == (20, None, None)


def test_a_shell_takes_what_to_type_as_it_stands(run: Path) -> None:
    words = how_to_go_on(run).split("the same command with ")[1]
    assert shlex.split(words) == ["--set", f"run.folder={run}", "--resume", "auto"]


def test_an_interrupted_run_says_what_is_saved_and_how_to_go_on_or_that_nothing_is(run: Path) -> None:
    assert interrupted("stopped by SIGINT", run) == (
        f"stopped by SIGINT, which saves nothing: step 20 was saved last; {how_to_go_on(run)}"
    )
    for folder in (run.parent, None):
        assert interrupted("stopped", folder) == "stopped, which saves nothing: no step was saved before"


def test_only_an_interrupt_is_told_that_way(run: Path) -> None:
    assert last_line(KeyboardInterrupt(), run) == interrupted("interrupted", run)
    assert last_line(DataError("no data"), run) == "no data"
