"""The bytes that a rank sends for one layer and microbatch by each method, counted and by formula.

Legend: s sequence, b micro batch, n heads, k key-value heads, d head size, C ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.context.ours import METHODS, Grids, Sample, pieces
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from benchmarks.support.shape import Shape
from benchmarks.tensor_parallel.traffic import count

#: Two layers and microbatches: what each adds is seen.
SHAPE = Shape(layers=2, hidden=128, heads=8, sequence=512, vocab=64, micro_batch=2, microbatches=2)
#: Ranks, key-value heads, type.
CASES = ((2, 8, "float32"), (2, 2, "float32"), (2, 2, "bfloat16"), (4, 8, "float32"), (4, 4, "bfloat16"))


def sample(kv_heads: int, dtype: str) -> Sample:
    """What is counted."""
    return Sample(SHAPE, kv_heads, getattr(torch, dtype))


def measure(kv_heads: int, dtype: str) -> dict[str, float]:
    """Bytes of each method, of one rank, layer and microbatch."""
    grids, found = Grids(), {}
    for method in METHODS:
        side = pieces(sample(kv_heads, dtype), grids.context, method)
        side.clear()
        found[method] = count(side.passes, side.ranks) / (SHAPE.layers * SHAPE.microbatches)
    return found


def formula(sample: Sample, ranks: int, method: str) -> float:
    """The same by arithmetic.

    ``ring`` and ``all_gather``: keys and values of a rank, 2*s/C*b*k*d, cross C - 1 times in the forward and again in
    the backward, and their gradients, in fp32 at least, C - 1 times in the backward. ``ulysses``: tokens of heads of
    others, (C - 1)/C of s/C*b*d for queries, keys, values and what comes of them, cross in the forward and in the
    backward; 2n + 2k heads.
    """
    shape, item = sample.shape, sample.dtype.itemsize
    heads, size = shape.heads, shape.hidden // shape.heads
    kv_heads = sample.kv_heads or heads
    tokens = shape.sequence // ranks * shape.micro_batch
    if method == "ulysses":
        return 2 * (ranks - 1) / ranks * tokens * (2 * heads + 2 * kv_heads) * size * item
    keys = 2 * tokens * kv_heads * size
    return (ranks - 1) * keys * (2 * item + max(item, 4))


def report(*, quick: bool) -> Iterator[str]:
    """Count every case, and tell what was found."""
    del quick  # counting takes seconds
    yield "\n## Bytes that a rank sends for one layer and microbatch\n"
    yield f"{SHAPE}; a forward and backward, without the sum of gradients that ends a step.\n"
    yield from table(("ranks", "key-value heads", "type", "method", "counted", "formula", "equal"), _rows())


def _rows() -> Iterator[tuple[object, ...]]:
    for ranks, kv_heads, dtype in CASES:
        found = on_ranks(measure, ranks, {"kv_heads": kv_heads, "dtype": dtype})
        for method, counted in found.items():
            expected = formula(sample(kv_heads, dtype), ranks, method)
            equal = "yes" if counted == expected else "no"
            yield ranks, f"{kv_heads} of {SHAPE.heads}", dtype, method, f"{counted:,.0f}", f"{expected:,.0f}", equal
