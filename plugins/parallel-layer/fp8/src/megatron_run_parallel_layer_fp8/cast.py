"""Division by scales and rounding to FP8 in one pass: an operation of its own, which graphs and compilers contain.

On a CUDA device it is a Triton kernel, which reads each value once and writes one byte, in whatever order the source
lies. Elsewhere PyTorch's own operations do the same in several passes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

#: Values of a tile, which one program of the kernel rounds.
_TILE = 64

_library = Library("megatron_run_fp8", "DEF")
_library.define("cast(Tensor matrix, Tensor scale, ScalarType dtype) -> Tensor")


def cast(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``matrix / scale`` rounded to the nearest values of ``dtype``, contiguous: [m, k], [1 or m, 1] -> [m, k]."""
    result: Tensor = torch.ops.megatron_run_fp8.cast(matrix, scale, dtype)
    return result


def _cast(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (matrix.float() / scale).to(dtype).contiguous()


def _cast_on_gpu(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    from megatron_run_parallel_layer_fp8.kernel import cast_tile

    result = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    (rows, columns), each = matrix.shape, scale.numel() > 1
    with torch.cuda.device_of(matrix):
        cast_tile[-(-rows // _TILE), -(-columns // _TILE)](
            matrix, scale, result, rows, columns, *matrix.stride(), int(each), _TILE
        )
    return result


def _like(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001  # the operation's signature
    return torch.empty(matrix.shape, dtype=dtype, device=matrix.device)


_library.impl("cast", _cast, "CPU")
_library.impl("cast", _cast_on_gpu, "CUDA")
_library.impl("cast", _like, "Meta")
