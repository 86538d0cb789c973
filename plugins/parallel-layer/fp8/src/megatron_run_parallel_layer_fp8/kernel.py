"""The kernels of :mod:`~megatron_run_parallel_layer_fp8.cast`, in Triton. Imported where they run alone.

Every division rounds to nearest, which Triton's own ``/`` does not: so a CPU finds the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def largest_of_parts(
    matrix: tl.tensor, found: tl.tensor, values: tl.tensor, each: tl.tensor, block: tl.constexpr
) -> None:
    """The largest magnitude of each program's share, ``each`` of the ``values`` in a row, fp32; NaN if one is NaN."""
    start = tl.program_id(0).to(tl.int64) * each
    lanes = tl.arange(0, block)
    best = tl.zeros([block], tl.int32)
    for offset in range(0, each, block):
        place = start + offset + lanes
        inside = (offset + lanes < each) & (place < values)
        best = tl.maximum(best, _bits(tl.load(matrix + place, mask=inside, other=0.0)))
    tl.store(found + tl.program_id(0), tl.max(best, 0))


@triton.jit
def scale_of_parts(
    found: tl.tensor, scale: tl.tensor, parts: tl.tensor, most: tl.tensor, least: tl.tensor, block: tl.constexpr
) -> None:
    """The one scale of a matrix from the largest magnitude of each of its parts."""
    lanes = tl.arange(0, block)
    best = tl.zeros([block], tl.int32)
    for start in range(0, parts, block):
        best = tl.maximum(best, tl.load(found + start + lanes, mask=start + lanes < parts, other=0))
    tl.store(scale, _scale(tl.max(best, 0), most, least))


@triton.jit
def scale_of_rows(
    matrix: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    most: tl.tensor,
    least: tl.tensor,
    block: tl.constexpr,
) -> None:
    """The scale of one row, whose values are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    best = tl.zeros([block], tl.int32)
    for start in range(0, columns, block):
        inside = start + lanes < columns
        value = tl.load(matrix + row * row_stride + start + lanes, mask=inside, other=0.0)
        best = tl.maximum(best, _bits(value))
    tl.store(scale + row, _scale(tl.max(best, 0), most, least))


@triton.jit
def cast_tile(
    matrix: tl.tensor,
    scale: tl.tensor,
    along: tl.tensor,
    across: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    each: tl.constexpr,
    both: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """One tile of ``matrix / scale``, as it lies into ``along`` [rows, columns], and with ``both`` into its transpose.

    ``each`` row has a scale, or all have one. Both results are contiguous.
    """
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # 64 bits: a matrix may have more than 2^31 values.
    wide, over = row.to(tl.int64), column.to(tl.int64)
    value = tl.load(matrix + wide[:, None] * row_stride + over[None, :] * column_stride, mask=inside, other=0.0)
    # One division a scale: a product has the same bits everywhere, and takes a tenth of a division's instructions.
    if each:
        divisor = tl.load(scale + wide, mask=row < rows, other=1.0)
        inverse = tl.math.div_rn(tl.full([tile_rows], 1.0, tl.float32), divisor)[:, None]
    else:
        inverse = tl.math.div_rn(1.0, tl.load(scale))
    rounded = (value.to(tl.float32) * inverse).to(along.dtype.element_ty)
    tl.store(along + wide[:, None] * columns + over[None, :], rounded, mask=inside)
    if both:
        tl.store(across + over[:, None] * rows + wide[None, :], tl.trans(rounded), mask=tl.trans(inside))


@triton.jit
def _bits(value: tl.tensor) -> tl.tensor:
    """The magnitude as an integer, in the order of magnitudes, infinity and NaN last: NaN wins a maximum."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(bits: tl.tensor, most: tl.tensor, least: tl.tensor) -> tl.tensor:
    """``largest / most``, at least ``least``; NaN if ``largest``, whose bits these are, is not finite."""
    largest = bits.to(tl.float32, bitcast=True)
    quotient = tl.maximum(tl.math.div_rn(largest, most), least)
    return tl.where(bits < 0x7F800000, quotient, float("nan"))
