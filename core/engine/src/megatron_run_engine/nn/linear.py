"""A linear layer whose backward a schedule may split in two.

The input gradient is computed at once, since the previous stage waits for it. The weight gradient is submitted to the
:class:`~megatron_run_engine.runtime.gradients.GradientAccumulator`, which computes it now (action B) or later (action
W) and accumulates it in ``main_grad``.

Legend: * any leading dimensions, N their product, i inputs, o outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run_engine.runtime.gradients import main_grad

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run_engine.runtime.gradients import GradientAccumulator


def linear(x: Tensor, weight: Parameter, bias: Parameter | None, gradients: GradientAccumulator) -> Tensor:
    """``x @ weight.T + bias``: x [*, i], weight [o, i], bias [o] -> [*, o]; weight gradients go to ``gradients``."""
    result: Tensor = _Linear.apply(x, weight, bias, gradients)  # type: ignore[no-untyped-call]  # torch's
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None, gradients: GradientAccumulator
    ) -> Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves, not saved tensors: under activation checkpointing those come back as copies
        # without main_grad.
        ctx.weight, ctx.bias, ctx.gradients = weight, bias, gradients
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,), (grad,) = ctx.saved_tensors, grads
        if ctx.weight.requires_grad:
            submit_gradients(ctx.gradients, ctx.weight, ctx.bias, x, grad)
        # None for weight and bias: autograd must not accumulate what has been submitted.
        return (grad @ ctx.weight if ctx.needs_input_grad[0] else None), None, None, None


def submit_gradients(
    gradients: GradientAccumulator, weight: Parameter, bias: Parameter | None, x: Tensor, grad: Tensor
) -> None:
    """Submit the gradients of ``weight`` [o, i] and ``bias`` [o] for input x [*, i] and output gradient [*, o]."""
    x2, grad2 = x.flatten(0, -2), grad.flatten(0, -2)  # [*, i] -> [N, i], [*, o] -> [N, o]

    def compute() -> None:
        add_product(main_grad(weight), grad2.t(), x2)
        if bias is not None:
            main_grad(bias).add_(grad2.sum(0))

    gradients.submit((weight,) if bias is None else (weight, bias), compute)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in one kernel where all types are equal.

    A 16-bit product is rounded before it is added to an fp32 total: PyTorch has no mixed-precision ``addmm_``.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
