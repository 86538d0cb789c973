"""The feed-forward networks that are experts.

Legend: m rows, h hidden, f feed-forward size, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_run_engine.nn.mlp import activation, input_parts

if TYPE_CHECKING:
    from megatron_run.contracts import ParallelLayers
    from megatron_run_engine.nn.spec import TransformerSpec


class Experts(nn.Module):
    """``output(activation(input(rows)))``, each expert on its own rows; within a tensor-parallel region."""

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec, experts: range, ffn: int) -> None:
        super().__init__()
        parts = input_parts(spec.activation, ffn, "model.expert_ffn_size")
        self.input = layers.expert_column_linear(experts, spec.hidden, parts, bias=spec.bias, init=spec.init)
        self.activation = activation(spec.activation)
        self.output = layers.expert_row_linear(experts, ffn, spec.hidden, bias=spec.bias, init=spec.residual_init)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[m, h] by expert, ``counts`` of each -> [m, h], a part of a sum over the tensor-parallel ranks."""
        inner = self.activation(self.input(rows, counts))  # [m, f/t]
        result: Tensor = self.output(inner, counts)
        return result
