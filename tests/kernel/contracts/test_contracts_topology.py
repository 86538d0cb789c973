from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from megatron_run.contracts.topology import Axis, Sizes, Topology
from megatron_run.errors import InputError


def test_tensor_is_fastest_then_context_then_data_then_pipeline() -> None:
    sizes = Sizes(tensor=2, context=2, data=2, pipeline=2)
    last = Topology(sizes, 15)
    assert (last.tensor_rank, last.context_rank, last.data_rank, last.stage) == (1, 1, 1, 1)
    assert Topology(sizes, 0).peers("tensor") == (0, 1)
    assert Topology(sizes, 0).peers("context") == (0, 2)
    assert Topology(sizes, 1).peers("replicas") == (1, 3, 5, 7)
    assert Topology(sizes, 1).peers("pipeline") == (1, 9)


@pytest.mark.parametrize("shape", list(product([1, 2, 3], [1, 2], [1, 2, 4], [1, 3])))
def test_coordinates_and_groups_agree_with_the_formula(shape: tuple[int, int, int, int]) -> None:
    tensor, context, data, pipeline = shape
    sizes = Sizes(tensor=tensor, context=context, data=data, pipeline=pipeline)
    members: dict[Axis, int] = {
        "tensor": tensor,
        "context": context,
        "replicas": context * data,
        "pipeline": pipeline,
    }
    for rank in range(sizes.world):
        here = Topology(sizes, rank)
        assert rank == here.tensor_rank + tensor * (here.context_rank + context * (here.data_rank + data * here.stage))
        for axis, size in members.items():
            assert len(here.peers(axis)) == size
            assert rank in here.peers(axis)


def test_groups_along_an_axis_partition_the_world() -> None:
    sizes = Sizes(tensor=2, context=2, data=4, pipeline=2, expert=2)
    for axis in get_args(Axis):
        if axis != "tie":
            members = [rank for group in Topology(sizes, 0).all_groups(axis) for rank in group]
            assert sorted(members) == list(range(32))


def test_experts_split_the_data_axis_into_neighbours() -> None:
    here = Topology(Sizes(data=4, expert=2), 3)
    assert here.peers("expert") == (2, 3)
    assert here.peers("expert_replicas") == (1, 3)


def test_pieces_of_a_sample_have_the_same_experts() -> None:
    here = Topology(Sizes(context=2, data=4, expert=2), 7)  # context 1, data 3
    assert here.peers("expert") == (5, 7)
    assert here.peers("expert_replicas") == (2, 3, 6, 7)


def test_tied_stages_are_the_ends_of_the_layout() -> None:
    sizes = Sizes(data=2, pipeline=3)
    assert Topology(sizes, 1).peers("tie") == (1, 5)
    assert Topology(sizes, 1, ends=(0, 0)).peers("tie") == (1,)


def test_an_expert_size_that_does_not_divide_data_is_refused_with_a_divisor() -> None:
    with pytest.raises(InputError, match=r"parallel.expert=3 does not divide the data-parallel size 4; choose a div"):
        Sizes(data=4, expert=3)
