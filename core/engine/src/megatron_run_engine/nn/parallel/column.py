"""The column-parallel product: entry into the region and product are one autograd function whose backward overlaps.

Legend: s sequence, b micro batch, i inputs, o outputs, t tensor-parallel size; x is [s, b, *] inside the region and
[s/t, b, *] outside under sequence parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run_engine.nn.linear import linear, submit_gradients
from megatron_run_engine.nn.parallel.mappings import f, gather_sequence

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run_engine.nn.parallel.tensor_split import Split
    from megatron_run_engine.runtime.gradients import GradientAccumulator


def column_linear(
    x: Tensor, weight: Parameter, bias: Parameter | None, gradients: GradientAccumulator, split: Split
) -> Tensor:
    """Enter the region and multiply: x [s, b, i] or [s/t, b, i], weight [o/t, i], bias [o/t] -> [s, b, o/t]."""
    if not (split.overlap and torch.is_grad_enabled()):
        enter = gather_sequence if split.sequence else f
        return linear(enter(x, split.peers), weight, bias, gradients)
    result: Tensor = _ColumnLinear.apply(x, weight, bias, gradients, split)  # type: ignore[no-untyped-call]  # torch's
    return result


class _ColumnLinear(torch.autograd.Function):
    """``f`` (or ``gather_sequence``) and the product in one function, so that their backwards can overlap.

    The forward saves this rank's part of x only; under sequence parallelism the backward gathers all of x again. In a
    split backward that happens in ``I``, so all of x [s, b, i] is held from ``I`` to ``W``. Without sequence
    parallelism it is held from the forward on.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None, gradients: GradientAccumulator, split: Split
    ) -> Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves, which have main_grad: saved tensors may come back as copies (see linear.py).
        ctx.weight, ctx.bias, ctx.gradients, ctx.split = weight, bias, gradients, split
        return F.linear(split.peers.gather(x) if split.sequence else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        """Overlap: x is gathered during the input gradient's product, that gradient is reduced during the weight's."""
        (x,), (grad,), peers, sequence = ctx.saved_tensors, grads, ctx.split.peers, ctx.split.sequence
        trains, summing = ctx.weight.requires_grad, None
        gathering = peers.start_gather(x) if sequence and trains else None
        # [s, b, i]: this rank's term of the input gradient, which the collective below sums
        partial = grad @ ctx.weight if ctx.needs_input_grad[0] else None
        x = gathering.wait() if gathering else x
        if partial is not None:
            summing = peers.start_scatter_sum(partial) if sequence else peers.start_sum(partial)
        if trains:
            submit_gradients(ctx.gradients, ctx.weight, ctx.bias, x, grad)
        return (summing.wait() if summing else None), None, None, None, None
