"""The words of errors: how their parts are joined, and the nearest values that would do."""

from __future__ import annotations

import pytest

from megatron_run.errors import (
    ExitCode,
    InputError,
    PluginError,
    Problems,
    advice,
    did_you_mean,
    locate,
    nearest_divisors,
    nearest_multiples,
)


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


def test_advice_reads_on_after_a_question() -> None:
    assert advice(did_you_mean("interleavd", ["1f1b", "interleaved"]), "installed: 1f1b, interleaved") == (
        "did you mean 'interleaved'? installed: 1f1b, interleaved"
    )
    assert advice(did_you_mean("zzz", ["1f1b"]), "installed: 1f1b") == "installed: 1f1b"
    assert advice("pip install it", "", "installed: 1f1b") == "pip install it; installed: 1f1b"


@pytest.mark.parametrize("number", range(1, 40))
def test_the_nearest_values_are_those_of_a_search(number: int) -> None:
    for other in range(1, 40):
        values = range(1, 100)
        if number % other:
            multiples = [value for value in values if value % other == 0]
            below = [value for value in multiples if value < number][-1:]
            above = [value for value in multiples if value > number][:1]
            assert nearest_multiples(number, other) == " or ".join(map(str, below + above))
            divisors = [value for value in values if number % value == 0]
            nearest = [max(value for value in divisors if value < other)]
            nearest += [value for value in divisors if value > other][:1]
            assert nearest_divisors(number, other) == " or ".join(map(str, nearest))
