"""The two ways to compute attention on a CPU: PyTorch's fused kernel, and two batched matrix products.

Forward and backward of the core alone, on the micro batch and the heads of the model. What is faster decides
``matmuls_are_faster`` in ``megatron_run/nn/core_attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.support.quiet import ratio, take_sample
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from megatron_run_engine.nn.attention import fused_attention, matmul_attention, matmuls_are_faster

THREADS, WARM_UP = 2, 2
MICRO_BATCH, HEADS, HEAD_SIZE = 4, 6, 64
WAYS: Mapping[str, Callable[..., Tensor]] = {"fused": fused_attention, "matmuls": matmul_attention}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (256, 512, 1024, 2048)


class Case(NamedTuple):
    """A computation: in which type, with which dropout, on how many tokens."""

    dtype: str
    dropout: float
    length: int


CASES = [Case(*case) for case in product(("fp32", "bf16"), (0.0, 0.1), LENGTHS)]
CASES += [Case("fp16", dropout, LENGTHS[0]) for dropout in (0.0, 0.1)]  # longer ones take minutes


def measure_attention(cases: Sequence[int], samples: int) -> list[dict[str, Any]]:
    """Of each case ``samples`` rounds of both ways, and which of them the layer takes."""
    return [_measure(CASES[case], samples) for case in cases]


def _measure(case: Case, samples: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    size = (case.length, MICRO_BATCH, HEADS * HEAD_SIZE)
    fused = torch.randn(*size[:2], 3 * size[2], generator=generator).to(DTYPES[case.dtype])  # as a layer computes it
    parts = [part.unflatten(-1, (HEADS, -1)).detach().requires_grad_() for part in fused.split(size[2], -1)]
    grad = torch.randn(size, generator=generator).to(DTYPES[case.dtype])

    def run(way: str) -> None:
        for _ in range(max(1, 512**2 // case.length**2)):  # so that a sample is long enough
            torch.autograd.grad(WAYS[way](*parts, None, case.dropout), parts, grad)

    rounds = [
        {f"{way} {what}": found for way in WAYS for what, found in asdict(take_sample(partial(run, way))).items()}
        for _ in range(WARM_UP + samples)
    ]
    chosen = "matmuls" if matmuls_are_faster(parts[0], case.dropout) else "fused"
    return {"chosen": chosen, "samples": rounds[WARM_UP:]}


def report(*, quick: bool) -> Iterator[str]:
    """Measure every case, quickly only those of the model's length, and tell what was found."""
    yield "\n## Two ways to compute attention\n"
    yield f"Forward and backward, {HEADS} heads of {HEAD_SIZE}, micro batch {MICRO_BATCH}, causal, {THREADS} threads.\n"
    cases = [index for index, case in enumerate(CASES) if case.length == LENGTHS[0] or not quick]
    job = {"cases": cases, "samples": 5 if quick else 9}
    found = on_ranks(measure_attention, 1, job, threads=THREADS, keeping=True)
    columns = ("type", "dropout", "tokens", "fused over matmuls, time", "taken", "samples used")
    yield from table(columns, (_row(CASES[case], each) for case, each in zip(cases, found, strict=True)))


def _row(case: Case, found: dict[str, Any]) -> tuple[object, ...]:
    kept, measured = ratio(found["samples"], "fused", "matmuls")
    return case.dtype, case.dropout, case.length, f"{measured:.2f}", found["chosen"], kept
