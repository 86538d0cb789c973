"""The sum of a matrix's rows, as of a bias's gradient, added to an fp32 total without being rounded in between.

Two kernels: the first sums parts of the rows, so many that all of the device is busy, the second sums the parts.
Temporaries are a few hundred kilobytes. Atomic additions would need one kernel, and give other bits in each run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

#: Columns of a program, and rows that it reads at a time.
BLOCK, BLOCK_ROWS = 128, 32
#: Programs that keep the largest devices busy, and rows that a program should have at least.
_PROGRAMS, _LEAST_ROWS = 512, 128

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("add_column_sums(Tensor(a!) total, Tensor matrix) -> ()")


def add_column_sums(total: Tensor, matrix: Tensor) -> None:
    """``total += matrix.sum(0)``: total [o] in fp32, contiguous, and matrix [N, o].

    ``linear.add_rows`` takes other totals too.
    """
    assert total.dtype == torch.float32
    assert total.is_contiguous()
    torch.ops.megatron_run_engine.add_column_sums(total, matrix)


def _add(total: Tensor, matrix: Tensor) -> None:
    from megatron_run_engine.nn.fused import sum_kernels as kernels

    rows, columns = matrix.shape
    if not matrix.numel():
        return
    across = -(-columns // BLOCK)
    of_a_part = max(_LEAST_ROWS, -(-rows * across // _PROGRAMS))
    parts = -(-rows // of_a_part)
    sums = torch.empty((parts, columns), dtype=torch.float32, device=matrix.device)
    with torch.cuda.device_of(matrix):
        kernels.partial_sums[across, parts](
            matrix, sums, matrix.stride(0), rows, columns, of_a_part, BLOCK_ROWS, BLOCK, num_warps=4
        )
        kernels.add_sums[(across,)](sums, total, parts, columns, BLOCK_ROWS, BLOCK, num_warps=4)


for _device in ("CPU", "CUDA"):
    _library.impl("add_column_sums", _add, _device)
_library.impl("add_column_sums", lambda *_: None, "Meta")
