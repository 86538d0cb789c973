"""FP8 matrices: values of 8 bits with scales, and the product of two.

A product is ``a @ b.T`` of two matrices whose rows are contiguous, because FP8 tensor cores read both along the
dimension that is summed over. A *scale* is what a value is multiplied by to get it back: one of the whole matrix, or
one of each row. Scales make the largest value the format's largest.

Legend: m, n rows of the factors, k columns of both, summed over.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from megatron_run_parallel_layer_fp8 import cublas
from megatron_run_parallel_layer_fp8.cast import cast, cast_both, cast_both_into, scale_of

#: One scale of a matrix, or one of each row.
Scaling = Literal["tensorwise", "rowwise"]
#: The sides of a matrix are multiples of it: tensor cores take 16 values of 8 bits at a time.
MULTIPLE = 16

_library = Library("megatron_run_fp8", "FRAGMENT")
_library.define("add_product(Tensor(a!) total, Tensor left, Tensor left_scale, Tensor right, Tensor right_scale) -> ()")


class Quantized(NamedTuple):
    """``values`` [m, k] in FP8, contiguous, and their ``scale``, fp32: [1, 1], or [m, 1] for one of each row."""

    values: Tensor
    scale: Tensor

    def widened(self) -> Tensor:
        """The values in fp32, scaled back: [m, k]."""
        return self.values.float() * self.scale


def quantize(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> Quantized:
    """``matrix`` [m, k], laid out in any way, rounded to the nearest values of ``dtype``.

    A value that is not finite makes its matrix, or row, NaN, so that the step's check finds it.
    """
    scale = scale_of(matrix, dtype, each=scaling == "rowwise")
    return Quantized(cast(matrix, scale, dtype), scale)


def quantize_both(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Quantized, Quantized]:
    """``matrix`` [m, k] and its transpose [k, m]; one scale of all values serves both."""
    if scaling == "rowwise":
        return quantize(matrix, dtype, scaling), quantize(matrix.t(), dtype, scaling)
    scale = scale_of(matrix, dtype, each=False)
    along, across = cast_both(matrix, scale, dtype)
    return Quantized(along, scale), Quantized(across, scale)


def write_both(copies: tuple[Quantized, Quantized], matrix: Tensor, scaling: Scaling) -> None:
    """Overwrite ``copies``, which :func:`quantize_both` has made of such a matrix, with those of ``matrix``."""
    along, across = copies
    if scaling == "rowwise":
        for copy, fresh in zip(copies, quantize_both(matrix, along.values.dtype, scaling), strict=True):
            copy.values.copy_(fresh.values)
            copy.scale.copy_(fresh.scale)
        return
    along.scale.copy_(scale_of(matrix, along.values.dtype, each=False))  # it is that of both
    cast_both_into(matrix, along.scale, along.values, across.values)


def quantize_across(matrix: Tensor, dtype: torch.dtype) -> Quantized:
    """The transpose [k, m] of ``matrix`` [m, k] with one scale: what :func:`quantize_both` returns second."""
    return quantize(matrix.t(), dtype, "tensorwise")


def product(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool) -> Tensor:
    """``a @ b.T + bias``, summed in fp32 and rounded to ``dtype`` once: [m, k], [n, k], [n] -> [m, n].

    ``fast``: a GPU's tensor cores keep their partial sums with fewer bits than fp32, which forwards bear. On a CPU the
    same values are multiplied in fp32.
    """
    if a.values.is_cuda:
        return torch._scaled_mm(
            a.values,
            b.values.t(),
            scale_a=_as_taken(a.scale),
            scale_b=_as_taken(b.scale).t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    result = a.widened() @ b.widened().t()
    return (result if bias is None else result + bias.float()).to(dtype)


def add_product(total: Tensor, a: Quantized, b: Quantized) -> None:
    """``total += a @ b.T``, in the type of ``total``: [m, n], [m, k], [n, k]; each factor has one scale.

    An operation of its own: on a GPU it calls a library besides torch.
    """
    torch.ops.megatron_run_fp8.add_product(total, *a, *b)


def _add(total: Tensor, *operands: Tensor) -> None:
    a, b = Quantized(*operands[:2]), Quantized(*operands[2:])
    total.add_(product(a, b, total.dtype, fast=False))


def _add_on_gpu(total: Tensor, *operands: Tensor) -> None:
    if not cublas.add_product(total, *operands):
        _add(total, *operands)


_library.impl("add_product", _add, "CPU")
_library.impl("add_product", _add_on_gpu, "CUDA")
_library.impl("add_product", lambda *_: None, "Meta")


def _as_taken(scale: Tensor) -> Tensor:
    """A scale as the library tells the two kinds apart: one number, or a column."""
    return scale.reshape(1, 1) if scale.numel() == 1 else scale
