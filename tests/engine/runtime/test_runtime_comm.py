from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_run.contracts.activity import Activity
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.runtime.comm import Groups, ParallelGroup, create_groups
from tests.support.ranks import run_ranks


def test_collectives_of_a_world_of_one_change_nothing() -> None:
    groups, tensor = Groups(), torch.tensor([3.0])
    assert groups.sum_(tensor, "world") is tensor
    assert groups.max_(tensor, "replicas").item() == 3.0
    assert groups.broadcast_(tensor, 0, "pipeline").item() == 3.0
    assert groups.gather_names(["a"], tensor.device) == [["a"]]


def sums(rank: int, world: int) -> dict[str, Any]:
    topology = Topology(Sizes(data=2, pipeline=2), rank)
    groups = create_groups(topology, timedelta(seconds=20))
    scopes = ("tensor", "replicas", "pipeline", "tie", "world")
    found = {scope: groups.sum_(torch.tensor([10.0**rank]), scope).item() for scope in scopes}  # type: ignore[arg-type]
    named = groups.gather_names(["é", "bc"][:rank], torch.device("cpu"))
    assert named == [["é", "bc"][:each] for each in range(world)]
    channels = groups.channels is not None and groups.channels.up is not groups.channels.down
    return {**found, "channels": channels, "max": groups.max_(torch.tensor([rank]), "replicas").item()}


@pytest.mark.multiproc
def test_each_axis_reduces_over_its_own_ranks() -> None:
    assert run_ranks(sums, 4) == [
        {"tensor": 1, "replicas": 11, "pipeline": 101, "tie": 101, "world": 1111, "channels": True, "max": 1},
        {"tensor": 10, "replicas": 11, "pipeline": 1010, "tie": 1010, "world": 1111, "channels": True, "max": 1},
        {"tensor": 100, "replicas": 1100, "pipeline": 101, "tie": 101, "world": 1111, "channels": True, "max": 3},
        {"tensor": 1000, "replicas": 1100, "pipeline": 1010, "tie": 1010, "world": 1111, "channels": True, "max": 3},
    ]


@pytest.mark.parametrize("rank", range(4))
def test_where_the_whole_world_makes_every_group_a_rank_keeps_those_that_it_is_in(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL, which splits communicators; gloo's groups are made by their members alone."""
    made: list[tuple[int, ...]] = []

    def new_group(ranks: list[int], *, timeout: timedelta, use_local_synchronization: bool) -> tuple[int, ...]:
        assert not use_local_synchronization
        made.append(tuple(ranks))
        return made[-1]

    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    topology = Topology(Sizes(data=2, pipeline=2), rank)
    groups = create_groups(topology, timedelta(seconds=20))
    kept: list[Any] = [groups.group("replicas"), groups.group("pipeline")]
    assert kept == [topology.peers("replicas"), topology.peers("pipeline")]
    assert set(made) == {(0, 1), (2, 3), (0, 2), (1, 3)}


def test_a_peer_alone_gives_back_what_it_is_given() -> None:
    alone, tensor = ParallelGroup(), torch.tensor([3.0, 4.0])
    pending = [alone.start_sum(tensor), alone.start_gather(tensor), alone.start_scatter_sum(tensor)]
    assert all(each.wait() is tensor for each in pending)
    assert alone.sum_(tensor) is alone.max_(tensor) is alone.gather(tensor) is alone.scatter_sum(tensor) is tensor
    assert tensor.tolist() == [3.0, 4.0]


def test_peers_without_a_group_never_talk_to_the_whole_world() -> None:
    planned, tensor = ParallelGroup(1, 2), torch.ones(4)
    for start in (planned.start_sum, planned.start_gather, planned.start_scatter_sum, planned.max_):
        with pytest.raises(AssertionError, match="2 ranks share this layer, but have no process group"):
            start(tensor)


def peers_at_work(rank: int, world: int) -> dict[str, Any]:
    topology = Topology(Sizes(tensor=2, data=world // 2), rank)
    activity, heard = Activity(), list[tuple[str, str]]()
    activity.listeners.append(lambda step, name, detail: heard.append((name, str(detail))))
    peers = create_groups(topology, timedelta(seconds=20), activity).parallel_group(topology, "tensor")
    column = torch.tensor([[10.0**rank], [2 * 10.0**rank]])  # [2, 1]
    strided = torch.arange(4.0).view(2, 2).t() + rank  # collectives want contiguous memory, layers need not know
    started = {
        "sum": peers.start_sum(column.clone()),
        "gather": peers.start_gather(column.clone()),
        "scatter_sum": peers.start_scatter_sum(column.clone()),
    }
    return {
        "index": (peers.index, peers.size),
        "sum": peers.sum_(column.clone()).flatten().tolist(),
        "max": peers.max_(column.clone()).flatten().tolist(),
        "gather": peers.gather(column).flatten().tolist(),
        "scatter_sum": peers.scatter_sum(column).flatten().tolist(),
        "started": {name: pending.wait().flatten().tolist() for name, pending in reversed(started.items())},
        "strided": (peers.gather(strided).tolist(), peers.scatter_sum(strided).tolist()),
        "input": column.flatten().tolist(),
        "phases": heard,
    }


@pytest.mark.multiproc
def test_peers_sum_gather_and_scatter_among_themselves_alone() -> None:
    for rank, found in enumerate(run_ranks(peers_at_work, 4)):
        index, pair = rank % 2, (rank - rank % 2, rank - rank % 2 + 1)
        low, high = 10.0 ** pair[0], 10.0 ** pair[1]
        both = low + high
        assert found["index"] == (index, 2)
        assert found["sum"] == [both, 2 * both]
        assert found["max"] == [high, 2 * high]
        assert found["gather"] == [low, 2 * low, high, 2 * high]
        assert found["scatter_sum"] == [[both], [2 * both]][index]
        assert found["started"] == {name: found[name] for name in ("sum", "gather", "scatter_sum")}
        rows = [[0.0, 2.0], [1.0, 3.0]]
        gathered = [[value + peer for value in row] for peer in pair for row in rows]
        assert found["strided"] == (gathered, [[2 * value + sum(pair) for value in rows[index]]])
        assert found["input"] == [10.0**rank, 2 * 10.0**rank]
        begun = list(dict.fromkeys(detail for name, detail in found["phases"] if name == "collective"))
        kinds = ("all-reduce of 2", "all-gather of 4", "reduce-scatter of 1")
        orders = [*kinds, kinds[0], kinds[0], kinds[1], kinds[2], "all-gather of 8", "reduce-scatter of 2"]
        assert begun == [f"{kind} values, number {n} over tensor" for n, kind in enumerate(orders, 1)]
        assert len(found["phases"]) == 4 * len(begun) - 2  # begun and waited for, but the maximum is one call


#: How many rows each rank has for each.
TRAFFIC = [[0, 2], [3, 1]]


def exchange(rank: int, world: int) -> dict[str, Any]:
    topology = Topology(Sizes(tensor=world), rank)
    groups = create_groups(topology, timedelta(seconds=20))
    rows = torch.tensor([[10.0 * rank + row] for row in range(sum(TRAFFIC[rank]))])
    receive = [sent[rank] for sent in TRAFFIC]
    arrived = groups.parallel_group(topology, "tensor").exchange(rows, TRAFFIC[rank], receive)
    told = groups.broadcast_(torch.tensor([rank]), 1, "world")
    return {"rows": arrived.flatten().tolist(), "told": told.item()}


@pytest.mark.multiproc
def test_peers_exchange_unequal_parts_and_any_rank_may_tell_the_others() -> None:
    assert run_ranks(exchange, 2) == [{"rows": [10, 11, 12], "told": 1}, {"rows": [0, 1, 13], "told": 1}]
