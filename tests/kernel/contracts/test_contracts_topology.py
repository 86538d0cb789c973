from __future__ import annotations

from itertools import product

import pytest

from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import InputError


def test_tensor_is_fastest_then_data_then_pipeline() -> None:
    sizes = Sizes(tensor=2, data=2, pipeline=2)
    last = Topology(sizes, 7)
    assert (last.tensor_rank, last.data_rank, last.stage) == (1, 1, 1)
    assert Topology(sizes, 0).peers("tensor") == (0, 1)
    assert Topology(sizes, 0).peers("data") == (0, 2)
    assert Topology(sizes, 1).peers("pipeline") == (1, 5)


@pytest.mark.parametrize("shape", list(product([1, 2, 3], [1, 2, 4], [1, 3])))
def test_coordinates_and_groups_agree_with_the_formula(shape: tuple[int, int, int]) -> None:
    tensor, data, pipeline = shape
    sizes = Sizes(tensor, data, pipeline)
    for rank in range(sizes.world):
        here = Topology(sizes, rank)
        assert rank == here.tensor_rank + tensor * (here.data_rank + data * here.stage)
        for axis, size in (("tensor", tensor), ("data", data), ("pipeline", pipeline)):
            assert len(here.peers(axis)) == size  # type: ignore[arg-type]  # a literal of the table above
            assert rank in here.peers(axis)  # type: ignore[arg-type]


def test_groups_along_an_axis_partition_the_world() -> None:
    sizes = Sizes(tensor=2, data=4, pipeline=2, expert=2)
    for axis in ("tensor", "data", "pipeline", "expert", "expert_data"):
        members = [rank for group in Topology(sizes, 0).all_groups(axis) for rank in group]
        assert sorted(members) == list(range(16))


def test_experts_split_the_data_axis_into_neighbours() -> None:
    here = Topology(Sizes(data=4, expert=2), 3)
    assert here.peers("expert") == (2, 3)
    assert here.peers("expert_data") == (1, 3)


def test_tied_stages_are_the_ends_of_the_layout() -> None:
    sizes = Sizes(data=2, pipeline=3)
    assert Topology(sizes, 1).peers("tie") == (1, 5)
    assert Topology(sizes, 1, ends=(0, 0)).peers("tie") == (1,)


def test_an_expert_size_that_does_not_divide_data_is_refused_with_a_divisor() -> None:
    with pytest.raises(InputError, match=r"parallel.expert=3 does not divide the data-parallel size 4; choose a div"):
        Sizes(data=4, expert=3)
