"""The distributed optimizer trains what the replicated one trains."""

from __future__ import annotations

import pytest

from megatron_run.config.request import Request
from tests.support.training import train_many

COMMON = ("train.steps=6", "parallel.data=2", "optimizer.bucket_size=3000")


def request(optimizer: str, *sets: str) -> Request:
    return Request(configs=("preset:tiny",), plugins=(f"optimizer={optimizer}",), sets=(*COMMON, *sets), nproc=2)


@pytest.mark.multiproc
def test_losses_and_norms_are_those_of_adamw_bit_for_bit() -> None:
    variants = [("train.precision=fp32",), ("train.precision=bf16",), ("optimizer.rule=muon",)]
    overlap = "zero1,overlap_param_gather=false,overlap_grad_reduce=false"
    for sets in variants:
        replicated, sharded, waiting = train_many(2, [request(name, *sets) for name in ("adamw", "zero1", overlap)])
        assert sharded[0].losses == replicated[0].losses == waiting[0].losses
        assert sharded[0].norms == replicated[0].norms == waiting[0].norms
        assert len(set(sharded[0].losses)) == len(sharded[0].losses)
