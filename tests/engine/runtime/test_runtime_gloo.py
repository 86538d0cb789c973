from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_run_engine.runtime.comm import ParallelGroup
from tests.support.ranks import run_ranks

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LENGTH = 4 * 64


def shares(world: int) -> tuple[range, ...]:
    return tuple(range(r * LENGTH // world, (r + 1) * LENGTH // world) for r in range(world))


def values(rank: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of very different sizes, so that the order of summation shows."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    exponents = torch.randint(-3, 4, (LENGTH,), generator=generator)
    return (torch.randn(LENGTH, generator=generator) * 10.0**exponents).to(dtype)


def sums_and_gathers(rank: int, world: int) -> dict[str, Any]:
    group = dist.new_group(list(range(world)))
    peers, mine = ParallelGroup(rank, world, group), slice(shares(world)[rank].start, shares(world)[rank].stop)
    equal = []
    for dtype in TYPES:
        reduced, flat = values(rank, 0, dtype), values(rank, 0, dtype)
        dist.all_reduce(reduced)
        equal.append(torch.equal(peers.start_sum_shares(flat, shares(world)).wait()[mine], reduced[mine]))
    flats = [values(rank, seed) for seed in range(3)]
    sums = [peers.start_sum_shares(flat, shares(world)) for flat in flats]
    holding = [torch.full((LENGTH,), float(rank)) for _ in range(3)]
    gathers = [peers.start_gather_shares(flat, shares(world)) for flat in holding]
    for pending in [*reversed(gathers), *reversed(sums), *sums]:  # in any order, and again
        pending.wait()
    exact = [sum(values(each, seed).double() for each in range(world))[mine] for seed in range(3)]  # type: ignore[index]
    apart = [((flat[mine] - right).abs() / right.abs()).max().item() for flat, right in zip(flats, exact, strict=True)]
    return {"equal": equal, "apart": max(apart), "gathered": [flat.tolist() for flat in holding]}


@pytest.mark.multiproc
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_shares_are_summed_as_an_all_reduce_does_and_gathered_whole(world: int) -> None:
    whole = [float(rank) for rank in range(world) for _ in range(LENGTH // world)]
    for found in run_ranks(sums_and_gathers, world):
        assert found["equal"] == [True] * len(TYPES)
        assert found["apart"] < 1e-3  # of what is left after terms have cancelled
        assert found["gathered"] == [whole] * 3


def bytes_of_a_sum(rank: int, world: int) -> int:
    """What is sent, in values: counted where it is handed to torch."""
    sent: list[int] = []
    send = dist.isend

    def noted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        sent.append(tensor.numel())
        return send(tensor, *arguments, **named)

    dist.isend = noted
    try:
        ParallelGroup(rank, world, dist.group.WORLD).start_sum_shares(values(rank, 0), shares(world)).wait()
    finally:
        dist.isend = send
    return sum(sent)


@pytest.mark.multiproc
def test_two_peers_send_half_a_buffer_each() -> None:
    assert run_ranks(bytes_of_a_sum, 2) == [LENGTH // 2] * 2


def wait_for_nobody(rank: int, world: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 1:
        return ""
    pending = ParallelGroup(rank, world, group).start_sum_shares(values(rank, 0), shares(world))
    try:
        pending.wait()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.multiproc
def test_a_peer_that_says_nothing_is_an_error_after_the_group_s_time_limit() -> None:
    assert "Timed out waiting 1000ms" in run_ranks(wait_for_nobody, 2)[0]
