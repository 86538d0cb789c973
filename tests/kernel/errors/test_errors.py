"""The words of errors: how their parts are joined, and the nearest values that would do."""

from __future__ import annotations

import pytest

from megatron_run.errors import ExitCode, InputError, PluginError, Problems, locate


def test_the_same_command_may_succeed_after_what_came_from_outside() -> None:
    """Scripts that resubmit jobs go by it."""
    assert [int(code) for code in ExitCode if code.retry] == [4, 75, 143]


def test_an_error_is_one_line_of_what_why_origin_and_fix() -> None:
    assert str(InputError("no", why="because", origin="--set a.b", fix="do")) == "no: because (from --set a.b); do"
    assert str(InputError("no", fix="do")) == "no; do"


def test_an_exception_is_told_where_it_was_raised() -> None:
    bug, mine, foreign = ValueError("x"), PluginError("a"), PluginError("b", origin="data.paths")
    for error in (bug, mine, foreign):
        locate(error, "rank 1, action 2, F1.0")
    assert bug.__notes__ == ["rank 1, action 2, F1.0"]
    assert str(mine) == "a (from rank 1, action 2, F1.0)"
    assert str(foreign) == "b (from data.paths, rank 1, action 2, F1.0)"


def test_several_problems_are_a_line_each_and_end_with_the_code_of_the_first() -> None:
    problems = Problems([PluginError("a"), InputError("b")])
    assert (str(problems), problems.exit_code) == ("a\nb", 3)
    with pytest.raises(ValueError, match="at least one"):
        Problems([])


def test_a_file_that_is_something_else_does_not_fill_the_screen() -> None:
    lines = str(Problems([InputError(f"mistake {number}") for number in range(25)])).splitlines()
    assert lines == [*(f"mistake {number}" for number in range(20)), "and 5 more mistakes"]
    assert str(Problems([InputError("a")] * 20)).splitlines() == ["a"] * 20
