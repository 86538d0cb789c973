"""Adds a product of bf16 matrices to an fp32 total on a CPU, without rounding it to bf16 in between.

torch's own products of bf16 matrices return bf16 there. The MKL inside its library has one that returns fp32; torch's
fused attention calls it, but no operation of torch does. Here it is an operation of its own, so that a captured or
compiled graph contains it. With AMX it takes 0.6 times as long as the rounded product and its addition; other CPUs
have not been measured, and keep the rounded one.

Legend: m, n rows and columns of the total, k terms of each sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.library import Library

_ROWS, _PLAIN, _TRANSPOSED = 101, 111, 112  # CBLAS's numbers for these words
#: m, n, k and leading dimensions are 32-bit integers.
_LARGEST = 2**31 - 1

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("add_wide_product(Tensor(a!) total, Tensor left, Tensor right) -> ()")


def can_add(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether :func:`add_wide_product` takes these."""
    types = (total.dtype, left.dtype, right.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    if not types or total.device.type != "cpu" or total.stride(-1) != 1 or _gemm() is None:
        return False
    return bool(max(*total.shape, left.shape[1], *total.stride(), *left.stride(), *right.stride()) <= _LARGEST)


def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` with fp32 sums: total [m, n] fp32, left [m, k] and right [k, n] bf16."""
    torch.ops.megatron_run_engine.add_wide_product(total, left, right)


def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
    gemm = _gemm()
    assert gemm is not None  # whoever calls has asked can_add()
    (m, n), k = total.shape, left.shape[1]
    if not m * n * k:
        return
    left, transpose_left, step_left = _operand(left)
    right, transpose_right, step_right = _operand(right)
    sizes, step = (m, n, k), max(n, total.stride(0))
    operands = (1.0, left.data_ptr(), step_left, right.data_ptr(), step_right, 1.0, total.data_ptr(), step)
    gemm(_ROWS, transpose_left, transpose_right, *sizes, *operands)


def _operand(matrix: Tensor) -> tuple[Tensor, int, int]:
    """``matrix``, copied where neither its rows nor its columns are contiguous; how it lies; its leading dimension."""
    rows, columns = matrix.shape
    for word, step, inner, least in ((_PLAIN, 0, 1, columns), (_TRANSPOSED, 1, 0, rows)):
        if matrix.stride(inner) == 1 and matrix.stride(step) >= least:
            return matrix, word, matrix.stride(step)
    return matrix.clone(memory_format=torch.contiguous_format), _PLAIN, columns


@cache
def _gemm() -> Callable[..., None] | None:
    """``cblas_gemm_bf16bf16f32`` of torch's library; None without it, or on a CPU where it may be slow."""
    try:
        if not torch.cpu._is_amx_tile_supported():
            return None
        found = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).cblas_gemm_bf16bf16f32
    except (AttributeError, OSError):
        return None
    number, factor, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    matrices = (factor, address, number, address, number, factor, address, number)
    found.argtypes, found.restype = (*(number,) * 6, *matrices), None
    made: Callable[..., None] = found
    return made


_library.impl("add_wide_product", _add, "CPU")
_library.impl("add_wide_product", lambda *_: None, "Meta")
