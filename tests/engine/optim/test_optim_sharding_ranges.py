from __future__ import annotations

import pytest

from megatron_run_engine.optim import ParamRange, param_range, param_ranges

#: Four parameters in a buffer of 16 values over four ranks: the drawing that explains Megatron's distributed optimizer.
#: Parameter 1 has one value on rank 0 and four on rank 1.
LENGTHS = {0: 3, 1: 6, 2: 3, 3: 4}
STARTS = {0: 0, 1: 3, 2: 9, 3: 12}
DRAWN = {
    0: {0: ((0, 3), (0, 3), (0, 3)), 1: ((3, 4), (3, 4), (0, 1))},
    1: {1: ((4, 8), (0, 4), (1, 5))},
    2: {1: ((8, 9), (0, 1), (5, 6)), 2: ((9, 12), (1, 4), (0, 3))},
    3: {3: ((12, 16), (0, 4), (0, 4))},
}


@pytest.mark.parametrize("rank", DRAWN)
def test_the_three_ranges_are_those_of_the_drawing(rank: int) -> None:
    share = range(4 * rank, 4 * rank + 4)
    found = dict(param_ranges(STARTS, LENGTHS, share))
    assert found == {
        parameter: ParamRange(*(range(*pair) for pair in ranges)) for parameter, ranges in DRAWN[rank].items()
    }


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_every_value_of_every_parameter_lies_in_exactly_one_share(shards: int) -> None:
    starts, lengths, total = {"a": 2, "b": 9, "c": 30}, {"a": 7, "b": 20, "c": 1}, 40
    size = total // shards
    seen: dict[str, list[int]] = {name: [] for name in starts}
    for rank in range(shards):
        share = range(rank * size, (rank + 1) * size)
        for name, found in param_ranges(starts, lengths, share):
            seen[name] += found.param
            assert [value - starts[name] for value in found.in_bucket] == list(found.param)
            assert [share[value] for value in found.local] == list(found.in_bucket)
    assert seen == {name: list(range(length)) for name, length in lengths.items()}


def test_a_parameter_that_touches_a_share_is_not_in_it() -> None:
    assert param_range(0, 4, range(4, 8)) is None
    assert param_range(8, 4, range(4, 8)) is None
    assert param_range(4, 0, range(4, 8)) is None
