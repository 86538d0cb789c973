"""The kernel of :mod:`~megatron_run_parallel_layer_fp8.cast`, in Triton. Imported where it runs alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cast_tile(
    matrix: tl.tensor,
    scale: tl.tensor,
    result: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    scale_stride: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """One tile of ``result`` [rows, columns], contiguous: ``matrix / scale``; ``scale_stride`` is 0 for one scale."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # 64 bits: a matrix may have more than 2^31 values.
    wide, across = row.to(tl.int64), column.to(tl.int64)
    place = wide[:, None] * row_stride + across[None, :] * column_stride
    value = tl.load(matrix + place, mask=inside, other=0.0).to(tl.float32)
    each = tl.load(scale + wide * scale_stride, mask=row < rows, other=1.0)
    tl.store(
        result + wide[:, None] * columns + across[None, :],
        (value / each[:, None]).to(result.dtype.element_ty),
        mask=inside,
    )
