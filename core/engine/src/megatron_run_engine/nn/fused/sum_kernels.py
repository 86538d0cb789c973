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
) -> None:
    """Write the sums of some columns over ``of_a_part`` rows: [rows, columns] -> ``sums`` [parts, columns] in fp32."""
    part = tl.program_id(1)
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    held = lanes < columns
    first, last = part * of_a_part, tl.minimum(part * of_a_part + of_a_part, rows)
    total = tl.zeros([block_rows, block], tl.float32)
    for start in range(first, last, block_rows):
        row = start + tl.arange(0, block_rows)
        place = matrix + row[:, None].to(tl.int64) * row_stride + lanes[None, :]
        total += tl.load(place, mask=(row < last)[:, None] & held[None, :], other=0.0).to(tl.float32)
    tl.store(sums + part.to(tl.int64) * columns + lanes, tl.sum(total, axis=0), mask=held)


@triton.jit
def add_sums(
    sums: tl.tensor,
    total: tl.tensor,
    parts: tl.tensor,
    columns: tl.tensor,
    block_parts: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Add the sums of ``parts`` rows to ``total``: [parts, columns], [columns], both in fp32."""
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    held = lanes < columns
    found = tl.zeros([block_parts, block], tl.float32)
    for start in range(0, parts, block_parts):
        part = start + tl.arange(0, block_parts)
        place = sums + part[:, None].to(tl.int64) * columns + lanes[None, :]
        found += tl.load(place, mask=(part < parts)[:, None] & held[None, :], other=0.0)
    result = tl.load(total + lanes, mask=held, other=0.0) + tl.sum(found, axis=0)
    tl.store(total + lanes, result, mask=held)
