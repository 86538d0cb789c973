"""The kernels of :mod:`column_sums`, in Triton. Their order of addition is fixed, so that a run can be repeated."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partial_sums(
    matrix: tl.tensor,
    sums: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    of_a_part: tl.tensor,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Write the sums of some columns over ``of_a_part`` rows: [rows, columns] -> ``sums`` [parts, columns] in fp32.

    The next blocks of rows, one fewer than ``stages``, are on their way while one is added.
    """
    part = tl.program_id(1)
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    held = lanes < columns
    first, last = part * of_a_part, tl.minimum(part * of_a_part + of_a_part, rows)
    total = tl.zeros([block_rows, block], tl.float32)
    for start in tl.range(first, last, block_rows, num_stages=stages):
        row = start + tl.arange(0, block_rows)
        place = matrix + row[:, None].to(tl.int64) * row_stride + lanes[None, :]
        total += tl.load(place, mask=(row < last)[:, None] & held[None, :], other=0.0).to(tl.float32)
    tl.store(sums + part.to(tl.int64) * columns + lanes, tl.sum(total, axis=0), mask=held)


@triton.jit
def add_sums(
    matrix: tl.tensor,
    total: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    block_rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Add the sum of all rows to ``total``: matrix [rows, columns], total [columns] in fp32."""
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    held = lanes < columns
    found = tl.zeros([block_rows, block], tl.float32)
    for start in range(0, rows, block_rows):
        row = start + tl.arange(0, block_rows)
        place = matrix + row[:, None].to(tl.int64) * row_stride + lanes[None, :]
        found += tl.load(place, mask=(row < rows)[:, None] & held[None, :], other=0.0).to(tl.float32)
    result = tl.load(total + lanes, mask=held, other=0.0) + tl.sum(found, axis=0)
    tl.store(total + lanes, result, mask=held)
