"""Scales, and rounding to FP8 by them: operations of their own, which graphs and compilers contain.

On a CUDA device they are Triton kernels: one reads each value once to find the scale, one reads it once more and writes
it in a byte, as it lies and transposed if both are wanted. Nothing is read by the host. Elsewhere PyTorch's own
operations do the same in several passes, and find the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

#: Values of a tile of the rounding kernel, rows and columns, and what suits it.
TILE, WARPS = (128, 64), 8
#: Values that a program reads at a time to find the largest one, and programs that keep the largest devices busy.
BLOCK, PROGRAMS = 8192, 1024
#: The widest block of a row.
_ROW = 4096
#: Of values near the smallest that fp32 has, the scale would lose its bits, or be zero.
_LEAST = torch.finfo(torch.float32).tiny

_library = Library("megatron_run_fp8", "DEF")
_library.define("scale(Tensor matrix, ScalarType dtype, bool each) -> Tensor")
_library.define("cast(Tensor matrix, Tensor scale, ScalarType dtype) -> Tensor")
_library.define("cast_both(Tensor matrix, Tensor scale, ScalarType dtype) -> (Tensor, Tensor)")
_library.define("cast_both_into(Tensor matrix, Tensor scale, Tensor(a!) along, Tensor(b!) across) -> ()")


def scale_of(matrix: Tensor, dtype: torch.dtype, *, each: bool) -> Tensor:
    """A factor that makes the largest value of ``matrix`` [m, k] that of ``dtype``: [1, 1], or [m, 1] of ``each`` row.

    NaN for a value that is not finite.
    """
    result: Tensor = torch.ops.megatron_run_fp8.scale(matrix, dtype, each)
    return result


def cast(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``matrix / scale`` rounded to the nearest values of ``dtype``, contiguous: [m, k], [1 or m, 1] -> [m, k]."""
    result: Tensor = torch.ops.megatron_run_fp8.cast(matrix, scale, dtype)
    return result


def cast_both(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """:func:`cast` and its transpose [k, m], contiguous too."""
    along, across = torch.ops.megatron_run_fp8.cast_both(matrix, scale, dtype)
    return along, across


def cast_both_into(matrix: Tensor, scale: Tensor, along: Tensor, across: Tensor) -> None:
    """Write what :func:`cast_both` returns into ``along`` and ``across``, which are contiguous."""
    torch.ops.megatron_run_fp8.cast_both_into(matrix, scale, along, across)


def _scale(matrix: Tensor, dtype: torch.dtype, each: bool) -> Tensor:
    along = 1 if each else None
    largest = torch.linalg.vector_norm(matrix, torch.inf, dim=along, keepdim=True, dtype=torch.float32)
    scale = (largest / torch.finfo(dtype).max).clamp(min=_LEAST)
    return torch.where(largest.isfinite(), scale, torch.nan)


def _cast(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # A product, as the kernel's: of one reciprocal a row it has the same bits on every device.
    return (matrix.float() * scale.reciprocal()).to(dtype).contiguous()


def _cast_both(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    along = _cast(matrix, scale, dtype)
    return along, along.t().contiguous()


def _cast_both_into(matrix: Tensor, scale: Tensor, along: Tensor, across: Tensor) -> None:
    along.copy_(_cast(matrix, scale, along.dtype))
    across.copy_(along.t())


def _scale_on_gpu(matrix: Tensor, dtype: torch.dtype, each: bool) -> Tensor:
    from megatron_run_parallel_layer_fp8 import kernel

    rows, columns = matrix.shape
    if not each and matrix.t().is_contiguous():
        matrix = matrix.t()  # the largest of all values does not depend on how they lie
    matrix = matrix.contiguous()
    scale = matrix.new_empty((rows if each else 1, 1), dtype=torch.float32)
    most = torch.finfo(dtype).max
    with torch.cuda.device_of(matrix):
        if each:
            block = min(_ROW, _power_of_two(columns))
            kernel.scale_of_rows[(rows,)](matrix, scale, columns, columns, most, _LEAST, block, num_warps=4)
            return scale
        values = matrix.numel()
        share = BLOCK * -(-values // (BLOCK * PROGRAMS))
        parts = -(-values // share)
        found = matrix.new_empty(parts, dtype=torch.int32)
        kernel.largest_of_parts[(parts,)](matrix, found, values, share, BLOCK, num_warps=8)
        kernel.scale_of_parts[(1,)](found, scale, parts, most, _LEAST, PROGRAMS, num_warps=4)
    return scale


def _cast_on_gpu(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    _launch(matrix, scale, result, None)
    return result


def _cast_both_on_gpu(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    along, across = _like_both(matrix, scale, dtype)
    _launch(matrix, scale, along, across)
    return along, across


def _launch(matrix: Tensor, scale: Tensor, along: Tensor, across: Tensor | None) -> None:
    from megatron_run_parallel_layer_fp8.kernel import cast_tile

    (rows, columns), (tall, wide) = matrix.shape, TILE
    with torch.cuda.device_of(matrix):
        cast_tile[-(-rows // tall), -(-columns // wide)](
            matrix,
            scale,
            along,
            along if across is None else across,
            rows,
            columns,
            *matrix.stride(),
            scale.numel() > 1,
            across is not None,
            tall,
            wide,
            num_warps=WARPS,
        )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _like_scale(matrix: Tensor, dtype: torch.dtype, each: bool) -> Tensor:  # noqa: ARG001  # the operation's signature
    return matrix.new_empty((len(matrix) if each else 1, 1), dtype=torch.float32)


def _like(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001  # likewise
    return torch.empty(matrix.shape, dtype=dtype, device=matrix.device)


def _like_both(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    along = _like(matrix, scale, dtype)
    return along, along.new_empty(matrix.shape[::-1])


_library.impl("scale", _scale, "CPU")
_library.impl("scale", _scale_on_gpu, "CUDA")
_library.impl("scale", _like_scale, "Meta")
_library.impl("cast", _cast, "CPU")
_library.impl("cast", _cast_on_gpu, "CUDA")
_library.impl("cast", _like, "Meta")
_library.impl("cast_both", _cast_both, "CPU")
_library.impl("cast_both", _cast_both_on_gpu, "CUDA")
_library.impl("cast_both", _like_both, "Meta")
_library.impl("cast_both_into", _cast_both_into, "CPU")
_library.impl("cast_both_into", _launch, "CUDA")
_library.impl("cast_both_into", lambda *_: None, "Meta")
