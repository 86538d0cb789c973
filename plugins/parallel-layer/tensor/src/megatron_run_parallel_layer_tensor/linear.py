"""Linear layers whose matrix is split by columns (its outputs) or by rows (its inputs), as in Megatron-LM.

In the paper's notation Y = X A: a column-parallel layer splits A = [A1, A2] by columns, each rank computes X A_i; a
row-parallel one splits A by rows, each rank computes X_i A_i and the results add up. One after the other they need no
communication in between. Weights are stored transposed, [outputs, inputs].

Legend: s sequence, b micro batch, i inputs, o outputs, t tensor-parallel size; x is [s, b, *] inside the region and
[s/t, b, *] outside under sequence parallelism.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import Init, ParameterSpec, Part
from megatron_run.nn import empty_parameter, linear, submit_gradients
from megatron_run_parallel_layer_tensor.regions import f, g, gather_sequence, scatter_sequence

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import BuildContext, LinearPart
    from megatron_run.gradients import Gradients
    from megatron_run_parallel_layer_tensor.split import Split


class ColumnLinear(nn.Module):
    """This rank's part of the outputs of each of ``parts``, one part after the other."""

    def __init__(
        self,
        context: BuildContext,
        split: Split,
        inputs: int,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
        init: Init,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gradients, self.split, self.norm = context.gradients, split, norm
        features = [split.part(part.features, f"features of {part.name}") for part in parts]
        self.weight = empty_parameter(context, sum(features), inputs)
        self.bias = empty_parameter(context, sum(features)) if bias else None
        self.parameter_specs = {
            "weight": ParameterSpec(init, _rows("weight", parts, features, split.peers.index, (inputs,))),
            "bias": ParameterSpec(Init("zeros"), _rows("bias", parts, features, split.peers.index, ())),
        }

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] or [s/t, b, i] -> [s, b, o/t]."""
        x = x if self.norm is None else self.norm(x)
        return column_linear(x, self.weight, self.bias, self.gradients, self.split)


class RowLinear(nn.Module):
    """Takes this rank's part of the inputs; the partial products of all ranks add up, then comes the bias."""

    def __init__(
        self, context: BuildContext, split: Split, inputs: int, outputs: int, *, bias: bool, init: Init
    ) -> None:
        super().__init__()
        self.gradients, self.split = context.gradients, split
        columns = split.part(inputs, "input features")
        self.weight = empty_parameter(context, outputs, columns)
        self.bias = empty_parameter(context, outputs) if bias else None
        part = Part("weight", (outputs, inputs), range(outputs), column=split.peers.index * columns)
        self.parameter_specs = {
            "weight": ParameterSpec(init, (part,)),
            "bias": ParameterSpec(Init("zeros"), partial_over="tensor" if split.sequence else None),
        }

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/t] -> [s, b, o] or [s/t, b, o]."""
        partial = linear(x, self.weight, None, self.gradients)
        leave = scatter_sequence if self.split.sequence else g
        y = leave(partial, self.split.peers)
        return y if self.bias is None else y + self.bias


def column_linear(x: Tensor, weight: Parameter, bias: Parameter | None, gradients: Gradients, split: Split) -> Tensor:
    """Enter the region and multiply: x [s, b, i] or [s/t, b, i], weight [o/t, i], bias [o/t] -> [s, b, o/t]."""
    if not split.overlap:
        enter = gather_sequence if split.sequence else f
        return linear(enter(x, split.peers), weight, bias, gradients)
    result: Tensor = _ColumnLinear.apply(x, weight, bias, gradients, split)  # type: ignore[no-untyped-call]  # torch's
    return result


class _ColumnLinear(torch.autograd.Function):
    """``f`` (or ``gather_sequence``) and the product in one, so that their backwards can overlap.

    What must be kept is this rank's part of x: under sequence parallelism the whole is gathered again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None, gradients: Gradients, split: Split
    ) -> Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves, which know their main_grad: saved tensors may come back as copies.
        ctx.weight, ctx.bias, ctx.gradients, ctx.split = weight, bias, gradients, split
        return F.linear(split.peers.gather(x) if split.sequence else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Each collective is in flight during one matrix product: the input's gradient, then the weight's."""
        (x,), (grad,), peers, sequence = ctx.saved_tensors, grads, ctx.split.peers, ctx.split.sequence
        gathering = peers.start_gather(x) if sequence else None
        partial = grad @ ctx.weight  # [s, b, i]: this rank's share of the input's gradient
        x = gathering.wait() if gathering else x
        summing = peers.start_scatter_sum(partial) if sequence else peers.start_sum(partial)
        if ctx.weight.requires_grad:
            submit_gradients(ctx.gradients, ctx.weight, ctx.bias, x, grad)
        return summing.wait(), None, None, None, None


def _rows(
    name: str, parts: tuple[LinearPart, ...], features: list[int], index: int, columns: tuple[int, ...]
) -> tuple[Part, ...]:
    """Where rank ``index``'s rows of the logical tensors ``<part>.<name>`` lie; ``features`` are its rows of each."""
    stops = accumulate(features)
    return tuple(
        Part(f"{part.name}.{name}", (part.features, *columns), range(stop - mine, stop), start=index * mine)
        for part, mine, stop in zip(parts, features, stops, strict=True)
    )
