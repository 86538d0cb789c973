"""Ranks that a suite starts by itself: they talk, they end, and what ended them is named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_run_testing import CheckFailed
from megatron_run_testing.ranks import run_on_ranks
from tests.support.census import Census
from tests.support.ranks import start_server

pytestmark = pytest.mark.multiproc


def sums(rank: int, world: int, base: float) -> Iterator[tuple[float, int]]:
    tensor = torch.tensor([base**rank])
    dist.all_reduce(tensor)
    yield tensor.item(), torch.get_num_threads()
    yield rank, world


def stumbles(rank: int, world: int, how: str) -> Iterator[int]:
    """Every rank yields its number, then the last one stumbles while the others wait for it."""
    yield rank
    if rank == world - 1:
        if how == "raises":
            raise ValueError("no more rows")
        if how == "fails a check":
            raise CheckFailed("rows differ")
        if how == "dies":
            os._exit(3)
        time.sleep(60)
    dist.barrier()
    yield -1


def doubles(rank: int, world: int, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    yield [2 * tensor for tensor in tensors]


def process_of(rank: int, world: int) -> Iterator[int]:
    yield os.getpid()


def test_ranks_talk_on_one_thread_each_and_yield_in_order() -> None:
    progress = run_on_ranks(sums, 3, 10.0)
    assert progress.failure == ""
    assert progress.yielded == tuple([(111.0, 1), (rank, 3)] for rank in range(3))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1: ValueError: no more rows (test_testing_ranks.py, line "),
        ("fails a check", "rank 1: rows differ (test_testing_ranks.py, line "),
        ("dies", "rank 1: the process ended without a word"),
    ],
)
def test_a_rank_that_stumbles_ends_all_and_what_came_before_is_kept(how: str, message: str) -> None:
    start = time.monotonic()
    progress = run_on_ranks(stumbles, 2, how, timeout=250)
    assert progress.failure.startswith(message)
    assert progress.yielded == ([0], [1])
    assert progress.common == 1
    assert time.monotonic() - start < 200  # nobody waits for a peer that will not come


def test_a_rank_that_hangs_is_ended_at_the_limit() -> None:
    progress = run_on_ranks(stumbles, 2, "hangs", timeout=8)
    assert "did not finish within 8 s" in progress.failure or "imed out" in progress.failure
    assert progress.yielded == ([0], [1])


def test_no_process_stays() -> None:
    (first,), (second,) = run_on_ranks(process_of, 2).yielded
    for process in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_what_ranks_are_given_and_yield_holds_no_descriptor() -> None:
    """Tensors come by value: a suite's results live as long as its caller keeps its checks."""
    tensors = [torch.full((3,), index, dtype=dtype) for index in range(20) for dtype in (torch.float32, torch.bfloat16)]
    start_server()
    before = Census.take()
    progress = run_on_ranks(doubles, 2, tensors)
    assert progress.failure == ""
    assert not Census.take().left(before)
    for ((found,),) in zip(progress.yielded, strict=True):
        assert [each.dtype for each in found] == [each.dtype for each in tensors]
        assert all(torch.equal(each, 2 * tensor) for each, tensor in zip(found, tensors, strict=True))
