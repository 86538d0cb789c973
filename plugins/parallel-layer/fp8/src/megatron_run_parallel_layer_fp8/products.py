"""The three products of a linear layer in FP8, and the options.

| product | factors | summed over |
|---|---|---|
| forward | x [N, i], weight [o, i] | inputs |
| input gradient | gradient [N, o], weight.T [i, o] | outputs |
| weight gradient | gradient.T [o, N], x.T [i, N] | tokens |

Every product wants the dimension that it sums over contiguous, so each operand is rounded as it lies and transposed.
One scale of a whole matrix serves both: one pass finds it, another rounds and writes both. The forward keeps the
transposed input in 8 bits, not the input; the gradient is rounded for both of its products at once; so are weights,
once a step (:mod:`~megatron_run_parallel_layer_fp8.weights`).

With a scale of each row they would be scaled along the other dimension too; over tokens, whose gradients differ most,
the weight gradient then keeps the run's type.

Legend: * any leading dimensions, N their product, i inputs, o outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from megatron_run_engine.nn import Operand, Products
from megatron_run_parallel_layer_fp8.quantized import (
    MULTIPLE,
    Quantized,
    Scaling,
    add_product,
    product,
    quantize,
    quantize_across,
    quantize_both,
)

if TYPE_CHECKING:
    from megatron_run_parallel_layer_fp8.weights import StepWeight

#: 4 bits of exponent and 3 of fraction, to 448; 5 and 2, to 57344.
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_VALUES = FORMATS["e4m3"]


class Options(BaseModel):
    """How operands are scaled, and the format of gradients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scaling: Scaling = Field("tensorwise", description="a scale of each matrix, or of each row (rowwise)")
    gradients: Literal["e4m3", "e5m2"] = Field("e5m2", description="format of gradients; all else is in E4M3")


class Fp8Products(Products):
    """Products of operands that are rounded to FP8 on the way; the results have the type of the operands.

    ``step_weight`` holds the weight of the one layer that multiplies by this; None: it is rounded for each product.
    """

    def __init__(self, options: Options, step_weight: StepWeight | None = None) -> None:
        self._scaling, self._gradients = options.scaling, FORMATS[options.gradients]
        self._step_weight = step_weight

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :class:`Products`."""
        return self._multiplied(quantize(x.flatten(0, -2), _VALUES, self._scaling), x, weight, bias)

    def forward_keeping(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Operand]:
        """See :class:`Products`."""
        if not self._sums_tokens(x):
            return super().forward_keeping(x, weight, bias)
        along, across = quantize_both(x.flatten(0, -2), _VALUES, self._scaling)
        return self._multiplied(along, x, weight, bias), across

    def keep_input(self, x: Tensor) -> Operand:
        """See :class:`Products`: x transposed in FP8 [i, N] and its scale, or x."""
        return quantize_across(x.flatten(0, -2), _VALUES) if self._sums_tokens(x) else (x,)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """See :class:`Products`."""
        return self._returned(quantize(grad.flatten(0, -2), self._gradients, self._scaling), grad, weight)

    def input_gradient_keeping(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Operand]:
        """See :class:`Products`."""
        if not self._sums_tokens(grad):
            return super().input_gradient_keeping(grad, weight)
        along, across = quantize_both(grad.flatten(0, -2), self._gradients, self._scaling)
        return self._returned(along, grad, weight), across

    def keep_gradient(self, grad: Tensor) -> Operand:
        """See :class:`Products`: ``grad`` transposed in FP8 [o, N] and its scale, or ``grad``."""
        return quantize_across(grad.flatten(0, -2), self._gradients) if self._sums_tokens(grad) else (grad,)

    def add_weight_gradient(self, total: Tensor, grad: Operand, x: Operand) -> None:
        """See :class:`Products`. The sums are added to ``total`` in its own type, unrounded where that is fp32."""
        if len(x) == 1:
            super().add_weight_gradient(total, grad, x)
        else:
            add_product(total, Quantized(*grad), Quantized(*x))

    def _sums_tokens(self, rows: Tensor) -> bool:
        """Whether weight gradients over the tokens of ``rows`` [*, k] are in FP8."""
        return self._scaling == "tensorwise" and rows.shape[:-1].numel() % MULTIPLE == 0

    def _multiplied(self, left: Quantized, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        held = self._step_weight and self._step_weight.held()
        right = held[0] if held else quantize(weight, _VALUES, self._scaling)
        return _shaped(product(left, right, x.dtype, bias, fast=True), x)

    def _returned(self, left: Quantized, grad: Tensor, weight: Tensor) -> Tensor:
        held = self._step_weight and self._step_weight.held()
        right = held[1] if held else quantize(weight.t(), _VALUES, self._scaling)
        return _shaped(product(left, right, grad.dtype, fast=False), grad)


def _shaped(result: Tensor, like: Tensor) -> Tensor:
    """``result`` [N, o] as [*, o] with the leading dimensions of ``like``; no view, which must not change in place."""
    shaped: Tensor = torch.ops.aten._unsafe_view(result, [*like.shape[:-1], result.shape[1]])
    return shaped
