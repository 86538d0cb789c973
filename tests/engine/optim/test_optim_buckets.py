from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import Parameter

from megatron_run.contracts import Init, ParamInfo
from megatron_run_engine.optim.buckets import ALIGNMENT, build_buckets
from megatron_run_engine.runtime.gradients import main_grad


def info(name: str) -> ParamInfo:
    return ParamInfo(name, (), Init("zeros"), decay=True)


def described(*sizes: int, prefix: str = "p") -> dict[Parameter, ParamInfo]:
    return {Parameter(torch.zeros(size)): info(f"{prefix}{index}") for index, size in enumerate(sizes)}


def test_parameters_lie_in_reverse_order_at_aligned_offsets() -> None:
    chunk = described(10, 100, 64)
    (bucket,) = build_buckets([chunk], shards=1)
    assert list(bucket.starts.values()) == [0, 64, 192]
    assert bucket.parameters == tuple(reversed(chunk))


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_a_bucket_splits_evenly_over_the_shards(shards: int) -> None:
    (bucket,) = build_buckets([described(10, 1000)], shards)
    assert bucket.grad.numel() % (shards * ALIGNMENT) == 0
    assert bucket.grad.numel() - 1088 < shards * ALIGNMENT


def test_main_grad_is_a_view_of_the_bucket() -> None:
    (bucket,) = build_buckets([described(10, 20)], shards=1)
    first, second = bucket.parameters
    main_grad(first).fill_(1.0)
    main_grad(second).fill_(2.0)
    assert bucket.grad.sum() == 20 * 1.0 + 10 * 2.0


def test_a_bucket_closes_once_it_is_full() -> None:
    buckets = build_buckets([described(64, 64, 64, 64, 64)], shards=1, capacity=128)
    assert [len(bucket.parameters) for bucket in buckets] == [2, 2, 1]


def test_chunks_and_partial_sums_have_buckets_of_their_own() -> None:
    first, second = described(8, 8), described(8, prefix="q")
    norm = next(iter(first))
    first[norm] = replace(first[norm], partial_over="tensor")
    buckets = build_buckets([first, second], shards=1)
    assert sorted((bucket.chunk, len(bucket.parameters)) for bucket in buckets) == [(0, 1), (0, 1), (1, 1)]


def test_a_tied_parameter_of_two_chunks_lies_alone_and_once() -> None:
    shared = Parameter(torch.zeros(8))
    tied = replace(info("embedding"), tie="embedding")
    buckets = build_buckets([{shared: tied, **described(4)}, {**described(4, prefix="q"), shared: tied}], shards=1)
    holding = [bucket for bucket in buckets if shared in bucket.starts]
    assert len(holding) == 1
    assert holding[0].chunk is None
    assert holding[0].parameters == (shared,)


def test_the_owner_of_a_tied_parameter_is_the_same_on_stages_of_other_loads() -> None:
    owners = []
    for size in (4, 100, 1000):
        tied = {Parameter(torch.zeros(8)): replace(info("embedding"), tie="embedding")}
        bucket = build_buckets([described(size), tied], shards=2, whole=True)[-1]
        owners.append([len(share) > 0 for share in bucket.shares])
        bucket = build_buckets([described(size), described(size), tied], shards=2, whole=True)[-1]
        owners.append([len(share) > 0 for share in bucket.shares])
    assert owners == owners[:1] * 6


@pytest.mark.parametrize("whole", [False, True])
def test_experts_lie_apart_and_are_shared_among_those_that_hold_them(whole: bool) -> None:  # pytest's
    chunk = described(100, 300)
    expert = next(iter(chunk))
    chunk[expert] = replace(chunk[expert], replicas="expert_replicas")
    buckets = {bucket.replicas: bucket for bucket in build_buckets([chunk], 4, whole=whole, expert_shards=2)}
    assert buckets["expert_replicas"].parameters == (expert,)
    assert {axis: len(bucket.shares) for axis, bucket in buckets.items()} == {"replicas": 4, "expert_replicas": 2}
    for bucket in buckets.values():
        assert sum(map(len, bucket.shares)) == len(bucket.grad)
