"""Linear layers whose matrix is split by columns (its outputs) or by rows (its inputs), as in Megatron-LM.

In the paper's notation Y = X A: a column-parallel layer splits A = [A1, A2] by columns, each rank computes X A_i; a
row-parallel one splits A by rows, each rank computes X_i A_i and the results are summed. A column-parallel layer
followed by a row-parallel one needs no communication in between. Weights are stored transposed, [outputs, inputs].

Legend: s sequence, b micro batch, i inputs, o outputs, t tensor-parallel size; x is [s, b, *] inside the region and
[s/t, b, *] outside under sequence parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_run.contracts import Init, ParameterSpec
from megatron_run_engine.nn import empty_parameter, linear
from megatron_run_engine.nn.parallel import column_linear, g, scatter_sequence

if TYPE_CHECKING:
    from megatron_run.contracts import LinearPart
    from megatron_run_engine.nn.parallel import Split
    from megatron_run_engine.runtime.context import BuildContext


class ColumnLinear(nn.Module):
    """Computes this rank's slice of the outputs of each of ``parts``, concatenated."""

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
        rows = split.features(parts)
        self.weight = empty_parameter(context, rows, inputs)
        self.bias = empty_parameter(context, rows) if bias else None
        self.parameter_specs = {
            "weight": ParameterSpec(init, split.rows_of("weight", parts, (inputs,))),
            "bias": ParameterSpec(Init("zeros"), split.rows_of("bias", parts)),
        }

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] or [s/t, b, i] -> [s, b, o/t]."""
        x = x if self.norm is None else self.norm(x)
        return column_linear(x, self.weight, self.bias, self.gradients, self.split)


class RowLinear(nn.Module):
    """Takes this rank's slice of the inputs; partial products are summed over the ranks, then the bias is added."""

    def __init__(
        self, context: BuildContext, split: Split, inputs: int, outputs: int, *, bias: bool, init: Init
    ) -> None:
        super().__init__()
        self.gradients, self.split = context.gradients, split
        self.weight = empty_parameter(context, outputs, split.part(inputs, "input features"))
        self.bias = empty_parameter(context, outputs) if bias else None
        self.parameter_specs = {
            "weight": ParameterSpec(init, split.columns_of("weight", inputs, outputs)),
            "bias": split.whole(ParameterSpec(Init("zeros"))),
        }

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/t] -> [s, b, o] or [s/t, b, o]."""
        partial = linear(x, self.weight, None, self.gradients)
        leave = scatter_sequence if self.split.sequence else g
        y = leave(partial, self.split.peers)
        return y if self.bias is None else y + self.bias
