"""The order in which buckets are sent, without any communication."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn import Parameter

from megatron_run.contracts import Init, ParamInfo
from megatron_run_engine.optim.buckets import Bucket, build_buckets
from megatron_run_engine.optim.reducer import BucketReducer
from megatron_run_engine.runtime.comm import Pending


class Waited(Pending):
    """Counts how often it was waited for."""

    def wait(self) -> torch.Tensor:
        self.tensor.add_(1)
        return self.tensor


@dataclass
class Bench:
    """A reducer of chunk 0 (two buckets), chunk 1 (one) and a tied parameter of both; ``sent`` lists what it sent."""

    reducer: BucketReducer
    buckets: list[Bucket]
    chunks: list[list[Parameter]]
    sent: list[Bucket]


def bench(*, early: bool = True) -> Bench:
    chunks = [[Parameter(torch.zeros(64)) for _ in range(2)], [Parameter(torch.zeros(64))]]
    tied = Parameter(torch.zeros(64))

    def info(name: str, **more: str) -> ParamInfo:
        return ParamInfo(name, (), Init("zeros"), decay=True, **more)  # type: ignore[arg-type]

    infos = [
        {tied: info("tied", tie="word"), **{p: info(f"{c}.{i}") for i, p in enumerate(members)}}
        for c, members in enumerate(chunks)
    ]
    buckets = build_buckets(infos, 1, capacity=1)
    sent: list[Bucket] = []

    def send(bucket: Bucket) -> Pending:
        sent.append(bucket)
        return Waited(bucket.grad)

    reducer = BucketReducer(buckets, send, early=early)
    reducer.start_step()
    return Bench(reducer, buckets, chunks, sent)


def test_a_complete_bucket_waits_for_those_before_it_in_its_chunk() -> None:
    made = bench()
    _, second, first, _ = made.buckets  # the tied one, then chunk 0's in reverse order, then chunk 1's
    made.reducer.arrived(made.chunks[0][0])
    assert made.sent == []
    made.reducer.arrived(made.chunks[0][1])
    assert made.sent == [second, first]


def test_what_is_left_of_a_chunk_leaves_with_it_and_nothing_leaves_twice() -> None:
    made = bench()
    made.reducer.arrived(made.chunks[1][0])
    made.reducer.arrived(made.chunks[0][1])
    made.reducer.flush(0)
    made.reducer.flush(0)
    made.reducer.flush(1)
    assert made.sent == [made.buckets[3], made.buckets[1], made.buckets[2]]


def test_a_tied_bucket_leaves_last_and_every_bucket_is_waited_for_once() -> None:
    made = bench()
    for parameter in made.buckets[0].parameters:
        made.reducer.arrived(parameter)
    made.reducer.flush(0)
    made.reducer.flush(1)
    assert made.buckets[0] not in made.sent
    made.reducer.finish()
    assert [bucket.grad[0].item() for bucket in made.buckets] == [1.0] * 4
    made.reducer.start_step()
    made.reducer.finish()
    assert made.sent.count(made.buckets[0]) == 2, "once a step"


@pytest.mark.parametrize("chunk", [0, 1])
def test_without_overlap_everything_leaves_at_the_end(chunk: int) -> None:
    made = bench(early=False)
    for parameter in made.chunks[chunk]:
        made.reducer.arrived(parameter)
    made.reducer.flush(chunk)
    assert made.sent == []
    made.reducer.finish()
    assert made.sent == made.buckets
