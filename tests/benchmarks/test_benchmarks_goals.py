"""Whom each benchmark's goals name, and by how much ours must beat them, in the words of their rows."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from benchmarks.moe import speed as moe
from benchmarks.optimizer import speed as optimizer
from benchmarks.single import speed as single
from benchmarks.support.goals import Goal
from benchmarks.tensor_parallel import speed as tensor_parallel

SINGLE = [
    "megatron-run, fp32: at least 1.00 of nanoGPT, fp32",
    "megatron-run, bf16: at least 1.20 of Hugging Face, erf GELU, bf16",
    "megatron-run, bf16: at least 1.35 of megatron-core, bf16",
    "megatron-run, fp32: at most 1.03 of bare loop, same modules, fp32",
    "megatron-run, bf16: at most 1.03 of bare loop, same modules, bf16",
]
TENSOR = [
    "tensor: at least 1.55 of dense, one rank",
    "tensor: at most 0.88 of DTensor",
    "tensor: at most 1.00 of megatron-core",
]
OPTIMIZER = ["zero1: at most 1.02 of DDP", "zero1: at most 0.97 of DeepSpeed ZeRO-1"]


@pytest.mark.parametrize(
    ("goals", "stated"),
    [
        (single.GOALS, SINGLE),
        (tensor_parallel.GOALS, TENSOR),
        (optimizer.GOALS, OPTIMIZER),
        ([moe.GOAL], ["megatron-run: at least 1.35 of naive loop"]),
    ],
    ids=["single", "tensor_parallel", "optimizer", "moe"],
)
def test_goals_name_the_sides_and_bounds_that_they_should(goals: Iterable[Goal], stated: list[str]) -> None:
    assert [f"{each.side}: {each.bound} {each.value:.2f} of {each.other}" for each in goals] == stated
