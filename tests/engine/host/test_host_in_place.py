"""A line that changes in place: one output in a notebook, a bar on a terminal, nothing in a file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megatron_run_engine.host.in_place import in_place
from tests.support.notebook_cell import Cell


def notebook(file: io.StringIO) -> Console:
    return Console(file=file, force_jupyter=True, _environ={})


def test_a_notebook_has_one_output_that_ends_with_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, file = Cell(monkeypatch), io.StringIO()
    bar = in_place(notebook(file), "step", 3000)
    assert bar is not None
    for step in range(1, 3001):
        bar.show(step, "loss 2.5 <x>")
    bar.stop()
    (output,) = cell.outputs
    assert output["text/plain"] == "step 3000/3000  loss 2.5 <x>"
    assert '<progress value="3000" max="3000"' in output["text/html"]
    assert "&lt;x&gt;" in output["text/html"]
    assert cell.drawn < 1000
    assert not file.getvalue()


def test_a_file_gets_nothing() -> None:
    assert in_place(Console(file=io.StringIO(), _environ={}), "step", 3) is None


@pytest.mark.parametrize("passing", [False, True])
def test_a_terminal_gets_a_bar_and_its_cursor_back(*, passing: bool) -> None:
    file = io.StringIO()
    bar = in_place(Console(file=file, force_terminal=True, width=80, _environ={}), "loading", 3, passing=passing)
    assert bar is not None
    for each in range(1, 4):
        bar.show(each, "tensors")
    bar.stop()
    assert "loading 3/3" in file.getvalue()
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1
    assert file.getvalue().rstrip().endswith("\x1b[2K") == passing  # it is wiped out


def test_what_is_done_soon_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, file = Cell(monkeypatch), io.StringIO()
    for console in (notebook(file), Console(file=file, force_terminal=True, _environ={})):
        bar = in_place(console, "loading", 3, after=1000.0)
        assert bar is not None
        for each in range(1, 4):
            bar.show(each, "tensors")
        bar.stop()
    assert not cell.outputs
    assert not file.getvalue()
