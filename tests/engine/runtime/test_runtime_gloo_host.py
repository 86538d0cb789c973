"""What gloo carries for GPUs goes through copies on the host: tried with the tensors of CPUs, told to be a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_run.config.request import Request
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.runtime import messages
from megatron_run_engine.runtime.comm import create_groups, gloo, groups
from tests.support.ranks import run_ranks
from tests.support.training import Seen, enter_new_world, train_here


@contextmanager
def as_on_gpus() -> Iterator[list[int]]:
    """Within, everything goes through the host; yields the sizes of what did."""
    copied: list[int] = []

    class Counted(gloo.OnHost):
        def wait(self) -> None:
            copied.append(self._copy.numel())
            self._result.fill_(-7)  # whatever the collective left on the device would be seen
            super().wait()

    with ExitStack() as patches:
        for module in (gloo, groups, messages):
            patches.enter_context(mock.patch.object(module, "passes_host", return_value=True))
        patches.enter_context(mock.patch.object(gloo, "OnHost", Counted))
        yield copied


def collectives(rank: int, world: int) -> list[list[float]]:
    made = create_groups(Topology(Sizes(data=world), rank), timedelta(seconds=20))
    peers, mine = made.parallel_group(Topology(Sizes(data=world), rank), "replicas"), 10.0**rank
    halves = [range(2), range(2, 4)]
    owned = [range(4), range(0)]
    with as_on_gpus() as copied:
        summed = peers.start_sum_shares(torch.full((4,), mine), halves).wait()[2 * rank : 2 * rank + 2]
        owner = peers.start_sum_shares(torch.full((4,), mine), owned).wait()
        found = [
            made.sum_(torch.full((2,), mine), "replicas"),
            made.max_(torch.full((2,), mine), "world"),
            made.broadcast_(torch.full((2,), mine), 1, "world"),
            peers.sum_(torch.full((2,), mine)),
            peers.max_(torch.full((2,), mine)),
            peers.gather(torch.full((2,), mine)),
            peers.scatter_sum(torch.arange(4.0) * mine),
            peers.exchange(torch.full((3,), mine), (1, 2), (rank + 1, rank + 1)),
            summed,
            owner if rank == 0 else torch.full((4,), 11.0),
            peers.start_gather_shares(torch.full((4,), mine), halves).wait(),
            peers.start_gather_shares(torch.full((4,), mine), owned).wait(),
        ]
        rows = [torch.zeros(2) for _ in range(world)] if rank == 0 else None
        made.gather_(torch.full((2,), mine), rows)
    assert len(copied) == len(found)
    return [each.tolist() for each in (*found, *(rows or ()))]


@pytest.mark.multiproc
def test_every_collective_gives_what_it_gives_without_the_host() -> None:
    first, second = run_ranks(collectives, 2)
    both = [[11, 11], [10, 10], [10, 10], [11, 11], [10, 10], [1, 1, 10, 10]]
    assert first[:6] == second[:6] == both
    assert (first[6], second[6]) == ([0, 11], [22, 33])
    assert (first[7], second[7]) == ([1, 10], [1, 1, 10, 10])
    assert first[8] == second[8] == [11, 11]
    assert first[9] == [11, 11, 11, 11]
    assert first[10:12] == second[10:12] == [[1, 1, 10, 10], [1, 1, 1, 1]]
    assert first[12:] == [[1, 1], [10, 10]]


def both_ways(rank: int, world: int, request: str, store: str) -> tuple[Seen, Seen, int]:
    plain = train_here(rank, world, request)
    enter_new_world(rank, world, store)
    with as_on_gpus() as copied:
        return plain, train_here(rank, world, request), len(copied)


@pytest.mark.multiproc
def test_a_run_through_the_host_trains_the_same_weights(tmp_path: Any) -> None:
    """Pipeline messages in parts, tensor-parallel layers, headers of experts' messages, sums over all."""
    split = ("parallel.pipeline=2", "parallel.tensor=2", "train.steps=3", "eval.interval=0", "eval.batches=1")
    small = ("model.num_layers=2", "model.hidden_size=16", "train.sequence_length=8", "train.micro_batch_size=4")
    request = Request(
        ("preset:tiny",), sets=(*split, *small), plugins=("parallel-layer=tensor", "schedule=1f1b"), nproc=4
    )
    for plain, through, copied in run_ranks(both_ways, 4, request.to_json(), str(tmp_path / "store")):
        assert copied
        assert plain.losses == through.losses
        assert plain.weights == through.weights
