"""Which bucket leaves when, without any communication."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from megatron_run.comm import Pending
from megatron_run.contracts import Init, ParamInfo
from megatron_run.gradients import Bucket, build_buckets
from megatron_run.optim.traffic import GradientTraffic


class Waited(Pending):
    """Counts how often it was waited for."""

    def wait(self) -> torch.Tensor:
        self.tensor.add_(1)
        return self.tensor


def traffic(*, early: bool = True) -> tuple[GradientTraffic, list[Bucket], list[list[Parameter]]]:
    """Chunk 0 of two buckets, chunk 1 of one, and a tied parameter in both chunks."""
    chunks = [[Parameter(torch.zeros(64)) for _ in range(2)], [Parameter(torch.zeros(64))]]
    tied = Parameter(torch.zeros(64))

    def info(name: str, **more: str) -> ParamInfo:
        return ParamInfo(name, (), Init("zeros"), decay=True, **more)  # type: ignore[arg-type]

    infos = [
        {tied: info("tied", tie="word"), **{p: info(f"{c}.{i}") for i, p in enumerate(members)}}
        for c, members in enumerate(chunks)
    ]
    buckets = build_buckets(infos, 1, capacity=1)
    made = GradientTraffic(buckets, lambda bucket: Waited(bucket.grad), early=early)
    made.start_step()
    return made, buckets, chunks


def test_a_complete_bucket_waits_for_those_before_it_in_its_chunk() -> None:
    made, buckets, (chunk, _) = traffic()
    _, second, first, _ = buckets  # the tied one, then chunk 0's in reverse order, then chunk 1's
    made.arrived(chunk[0])
    assert made.sent == []
    made.arrived(chunk[1])
    assert made.sent == [second, first]


def test_what_is_left_of_a_chunk_leaves_with_it_and_nothing_leaves_twice() -> None:
    made, buckets, (chunk, (last,)) = traffic()
    made.arrived(last)
    made.arrived(chunk[1])
    made.flush(0)
    made.flush(0)
    made.flush(1)
    assert made.sent == [buckets[3], buckets[1], buckets[2]]


def test_a_tied_bucket_leaves_last_and_every_bucket_is_waited_for_once() -> None:
    made, buckets, _ = traffic()
    for parameter in buckets[0].parameters:
        made.arrived(parameter)
    made.flush(0)
    made.flush(1)
    assert buckets[0] not in made.sent
    made.finish()
    assert [bucket.grad[0].item() for bucket in buckets] == [1.0] * 4
    made.start_step()
    assert made.sent == []


@pytest.mark.parametrize("chunk", [0, 1])
def test_without_overlap_everything_leaves_at_the_end(chunk: int) -> None:
    made, buckets, chunks = traffic(early=False)
    for parameter in chunks[chunk]:
        made.arrived(parameter)
    made.flush(chunk)
    assert made.sent == []
    made.finish()
    assert made.sent == buckets
