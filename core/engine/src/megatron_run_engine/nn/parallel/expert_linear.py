"""Linear layers of experts: each expert's matrix is split like that of a column- or row-parallel layer.

They contain no collectives: those at the edges of the surrounding region serve all of its layers.

Legend: e experts of this rank, n rows of all of them, i inputs, o outputs, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_run.contracts import Init, ParameterSpec, Part
from megatron_run_engine.nn.grouped import grouped_linear
from megatron_run_engine.nn.parameter import empty_parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_run.contracts import LinearPart
    from megatron_run_engine.nn.parallel.tensor_split import Split
    from megatron_run_engine.runtime.context import BuildContext


class ExpertColumnLinear(nn.Module):
    """Column-parallel: computes this rank's share of the output features of each of ``parts``, for each expert."""

    def __init__(
        self,
        context: BuildContext,
        split: Split,
        experts: range,
        inputs: int,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
        init: Init,
    ) -> None:
        super().__init__()
        self.gradients = context.gradients
        rows = split.features(parts)
        self.weight = empty_parameter(context, len(experts) * rows, inputs)
        self.bias = empty_parameter(context, len(experts) * rows) if bias else None
        weights, biases = split.rows_of("weight", parts, (inputs,)), split.rows_of("bias", parts)
        self.parameter_specs = {
            "weight": ParameterSpec(init, tuple(_per_expert(experts, weights, rows)), replicas="expert_data"),
            "bias": ParameterSpec(Init("zeros"), tuple(_per_expert(experts, biases, rows)), replicas="expert_data"),
        }

    def forward(self, rows: Tensor, counts: Tensor | int) -> Tensor:
        """[n, i] -> [n, o/t]."""
        return grouped_linear(rows, self.weight, self.bias, counts, self.gradients)


class ExpertRowLinear(nn.Module):
    """Row-parallel: takes this rank's share of the input features and returns one of t terms of the output.

    Each rank adds 1/t of the bias, so that the sum over the ranks contains it once.
    """

    def __init__(
        self, context: BuildContext, split: Split, experts: range, inputs: int, outputs: int, *, bias: bool, init: Init
    ) -> None:
        super().__init__()
        self.gradients, self.bias_share = context.gradients, 1 / split.peers.size
        self.weight = empty_parameter(context, len(experts) * outputs, split.part(inputs, "input features"))
        self.bias = empty_parameter(context, len(experts) * outputs) if bias else None
        weights, biases = split.columns_of("weight", inputs, outputs), (Part("bias", (outputs,), range(outputs)),)
        self.parameter_specs = {
            "weight": ParameterSpec(init, tuple(_per_expert(experts, weights, outputs)), replicas="expert_data"),
            "bias": ParameterSpec(
                Init("zeros"),
                tuple(_per_expert(experts, biases, outputs)),
                partial_over=split.axis if split.peers.size > 1 else None,
                replicas="expert_data",
            ),
        }

    def forward(self, rows: Tensor, counts: Tensor | int) -> Tensor:
        """[n, i/t] -> [n, o]."""
        return grouped_linear(rows, self.weight, self.bias, counts, self.gradients, self.bias_share)


def _per_expert(experts: range, parts: tuple[Part, ...], rows: int) -> Iterator[Part]:
    """``parts``, which describe one expert's ``rows``, repeated for each of ``experts``, whose rows are stacked."""
    for index, expert in enumerate(experts):
        for part in parts:
            local = range(part.local.start + index * rows, part.local.stop + index * rows)
            yield replace(part, name=f"{expert}.{part.name}", local=local)
