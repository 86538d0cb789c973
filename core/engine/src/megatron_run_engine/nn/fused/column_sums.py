"""The sum of a matrix's rows, as of a bias's gradient, added to an fp32 total without being rounded in between.

Two kernels: the first sums parts of the rows, so many that all of the device is busy, the second sums the parts. Few
rows, such as parts that another kernel has made, are left to the second alone. Temporaries are a few hundred kilobytes.
Atomic additions would need one kernel, and give other bits in each run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import Library


class Tile(NamedTuple):
    """The block that programs of a kernel read at a time; ``stages`` of it are on their way at once."""

    rows: int
    columns: int
    warps: int
    stages: int


class Parts(NamedTuple):
    """How rows are cut: ``down`` parts of ``rows`` each, the last of fewer perhaps, which ``across`` programs share."""

    across: int
    down: int
    rows: int


#: Tiles of the two kernels, by what an H200 showed.
PARTIAL, FINAL = Tile(32, 128, 4, 4), Tile(256, 16, 8, 1)
#: Programs that keep the largest devices busy: four for each of the 132 multiprocessors of an H100 or H200.
PROGRAMS = 528
#: Rows that the second kernel sums alone, since a pass over them takes less time than another launch.
FEW_ROWS = 640

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("add_column_sums(Tensor(a!) total, Tensor matrix) -> ()")


def add_column_sums(total: Tensor, matrix: Tensor) -> None:
    """``total += matrix.sum(0)``: total [o] in fp32, contiguous, and matrix [N, o].

    ``linear.add_rows`` takes other totals too.
    """
    assert total.dtype == torch.float32
    assert total.is_contiguous()
    torch.ops.megatron_run_engine.add_column_sums(total, matrix)


def parts_of(rows: int, columns: int, tile: Tile, programs: int) -> Parts:
    """Parts of whole tiles, about as many as occupy that number of ``programs``."""
    across = -(-columns // tile.columns)
    tiles = -(-rows // tile.rows)
    of_a_part = max(1, -(-tiles * across // programs)) * tile.rows
    return Parts(across, -(-rows // of_a_part), of_a_part)


def _add(total: Tensor, matrix: Tensor) -> None:
    from megatron_run_engine.nn.fused import sum_kernels as kernels

    rows, columns = matrix.shape
    if not matrix.numel():
        return
    with torch.cuda.device_of(matrix):
        if rows > FEW_ROWS:
            tile, parts = PARTIAL, parts_of(rows, columns, PARTIAL, PROGRAMS)
            sums = torch.empty((parts.down, columns), dtype=torch.float32, device=matrix.device)
            kernels.partial_sums[parts.across, parts.down](
                matrix, sums, matrix.stride(0), rows, columns, parts.rows, tile.rows, tile.columns, tile.stages,
                num_warps=tile.warps,
            )  # fmt: skip
            matrix, rows = sums, parts.down
        kernels.add_sums[(-(-columns // FINAL.columns),)](
            matrix, total, matrix.stride(0), rows, columns, FINAL.rows, FINAL.columns, num_warps=FINAL.warps
        )


for _device in ("CPU", "CUDA"):
    _library.impl("add_column_sums", _add, _device)
_library.impl("add_column_sums", lambda *_: None, "Meta")
