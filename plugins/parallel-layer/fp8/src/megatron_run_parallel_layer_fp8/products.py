"""The three products of a linear layer in FP8, and the options.

| product | factors | summed over |
|---|---|---|
| forward | x [N, i], weight [o, i] | inputs |
| input gradient | gradient [N, o], weight.T [i, o] | outputs |
| weight gradient | gradient.T [o, N], x.T [i, N] | tokens |

Each operand is rounded twice a step, along and across, since every product wants the dimension that it sums over
contiguous. With a scale of each row they would be scaled along that dimension too; over tokens, whose gradients differ
most, the weight gradient then keeps the run's type.

Legend: * any leading dimensions, N their product, i inputs, o outputs.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from megatron_run_engine.nn import Products
from megatron_run_parallel_layer_fp8.quantized import MULTIPLE, Quantized, Scaling, product, quantize

#: 4 bits of exponent and 3 of fraction, to 448; 5 and 2, to 57344.
_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Options(BaseModel):
    """How operands are scaled, and the format of gradients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scaling: Scaling = Field("tensorwise", description="a scale of each matrix, or of each row (rowwise)")
    gradients: Literal["e4m3", "e5m2"] = Field("e5m2", description="format of gradients; all else is in E4M3")


class Fp8Products(Products):
    """Products of operands that are rounded to FP8 on the way; the results have the type of the operands."""

    def __init__(self, options: Options) -> None:
        self._scaling, self._gradients = options.scaling, _FORMATS[options.gradients]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :class:`Products`."""
        left, right = self._value(x.flatten(0, -2)), self._value(weight)
        return _shaped(product(left, right, x.dtype, bias, fast=True), x)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """See :class:`Products`."""
        left, right = quantize(grad.flatten(0, -2), self._gradients, self._scaling), self._value(weight.t())
        return _shaped(product(left, right, grad.dtype, fast=False), grad)

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """See :class:`Products`. The sums are added to ``total`` in its own type, unrounded where that is fp32."""
        if self._scaling == "rowwise" or len(x) % MULTIPLE:
            super().add_weight_gradient(total, grad, x)
            return
        left, right = quantize(grad.t(), self._gradients, self._scaling), self._value(x.t())
        total.add_(product(left, right, total.dtype, fast=False))

    def _value(self, matrix: Tensor) -> Quantized:
        return quantize(matrix, _FORMATS["e4m3"], self._scaling)


def _shaped(result: Tensor, like: Tensor) -> Tensor:
    """``result`` [N, o] as [*, o] with the leading dimensions of ``like``; no view, which must not change in place."""
    shaped: Tensor = torch.ops.aten._unsafe_view(result, [*like.shape[:-1], result.shape[1]])
    return shaped
