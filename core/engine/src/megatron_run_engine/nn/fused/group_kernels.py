"""Weight gradients of products by groups of rows, in Triton: no number of theirs comes from the host.

torch's grouped product returns 16-bit operands' sums in 16 bits, so that each microbatch would round its weight
gradient before it is added. This kernel adds sums of fp32 to totals of any type. It is one of two ways of an operation
of ``nn.device_groups``; the other is that of CPUs.

Legend: g groups, n rows of all groups together, a and c features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

#: Features of a tile, of left and of right; its rows at a time; what suits that on Hopper: 144 KiB of shared memory.
TILE_A, TILE_C, ROWS, WARPS, STAGES = 128, 256, 64, 8, 3


def add_grouped_products(totals: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """``totals[g] += left[g].T @ right[g]`` over the rows of each group, which end at ``ends`` [g], int32.

    ``totals`` [g, a, c], ``left`` [n, a] and ``right`` [n, c] are contiguous, on one device. A group without rows keeps
    its total.
    """
    groups, a, c = totals.shape
    grid = (triton.cdiv(a, TILE_A) * triton.cdiv(c, TILE_C), groups)
    with torch.cuda.device_of(totals):
        add_products[grid](totals, left, right, ends, a, c, TILE_A, TILE_C, ROWS, num_warps=WARPS, num_stages=STAGES)


@triton.jit
def add_products(
    totals: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    ends: tl.tensor,
    a: tl.tensor,
    c: tl.tensor,
    tile_a: tl.constexpr,
    tile_c: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    """Add one tile of one group's products: a program reads the group's rows in blocks and sums in fp32."""
    group = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(c, tile_c)
    of_a = tl.program_id(0) // across * tile_a + tl.arange(0, tile_a)
    of_c = tl.program_id(0) % across * tile_c + tl.arange(0, tile_c)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    sums = tl.zeros([tile_a, tile_c], tl.float32)
    for row in range(start, end, rows):
        at = (row + tl.arange(0, rows)).to(tl.int64)[:, None]  # 64 bits: rows times features pass 2^31
        one = tl.load(left + at * a + of_a, mask=(at < end) & (of_a < a), other=0.0)
        other = tl.load(right + at * c + of_c, mask=(at < end) & (of_c < c), other=0.0)
        sums = tl.dot(tl.trans(one), other, sums, input_precision="ieee")
    if end > start:
        place = totals + (group * a + of_a[:, None]) * c + of_c
        inside = (of_a[:, None] < a) & (of_c < c)
        before = tl.load(place, mask=inside, other=0.0)
        tl.store(place, (before.to(tl.float32) + sums).to(before.dtype), mask=inside)
