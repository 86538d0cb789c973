"""Parallel layers ``tensor``: each layer split over the ranks of ``parallel.tensor``, as in Megatron-LM.

A transformer layer needs two all-reduces in its forward and two in its backward (Shoeybi et al. 2019, figure 4). With
``parallel.sequence`` these become pairs of all-gather and reduce-scatter, and norms, dropout and the residual stream
hold s/t of the sequence (Korthikanti et al. 2022).

In the paper's notation Y = X A: a column-parallel layer splits A = [A1, A2] by columns (its outputs), each rank
computes X A_i; a row-parallel one splits A by rows (its inputs), each rank computes X_i A_i and the results are summed.
A column-parallel layer followed by a row-parallel one needs no communication in between. Weights are stored transposed,
[outputs, inputs]. The building blocks are the engine's, in ``megatron_run_engine.nn.parallel``.

Legend: s sequence, b micro batch, i inputs, o outputs, t tensor-parallel size; x is [s, b, *] inside the region and
[s/t, b, *] outside under sequence parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from megatron_run.contracts import Init, ParallelLayers, ParameterSpec, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.nn import CoreAttention, LinearLayer, empty_parameter, make_norm
from megatron_run_engine.nn.parallel import LayerSplit, SplitLayers, column_linear, g, linear, scatter_sequence

if TYPE_CHECKING:
    from megatron_run.contracts import AttentionShape, LinearSpec, NormKind
    from megatron_run_engine.nn import Activation
    from megatron_run_engine.runtime import BuildContext


class ColumnLinear(LinearLayer):
    """Computes this rank's slice of the outputs of each of ``parts``, concatenated."""

    activates = True

    def __init__(
        self, context: BuildContext, split: LayerSplit, spec: LinearSpec, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gradients, self.split, self.norm = context.gradients, split, norm
        rows = split.features(spec.parts)
        self.weight = empty_parameter(context, rows, spec.inputs)
        self.bias = empty_parameter(context, rows) if spec.bias else None
        self.parameter_specs = {
            "weight": ParameterSpec(spec.init, split.rows_of("weight", spec.parts, (spec.inputs,))),
            "bias": ParameterSpec(Init("zeros"), split.rows_of("bias", spec.parts)),
        }

    def forward(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """[s, b, i] or [s/t, b, i] -> [s, b, o/t]."""
        x = x if self.norm is None else self.norm(x)
        return column_linear(x, self.weight, self.bias, self.gradients, self.split, self.products, activation)


class RowLinear(LinearLayer):
    """Takes this rank's slice of the inputs; partial products are summed over the ranks, then the bias is added."""

    def __init__(self, context: BuildContext, split: LayerSplit, spec: LinearSpec) -> None:
        super().__init__()
        self.gradients, self.split = context.gradients, split
        self.weight = empty_parameter(context, spec.features, split.part(spec.inputs, "input features"))
        self.bias = empty_parameter(context, spec.features) if spec.bias else None
        self.parameter_specs = {
            "weight": ParameterSpec(spec.init, split.columns_of("weight", spec.inputs, spec.features)),
            "bias": split.whole(ParameterSpec(Init("zeros"))),
        }

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/t] -> [s, b, o] or [s/t, b, o]."""
        partial = linear(x, self.weight, None, self.gradients, self.products)
        leave = scatter_sequence if self.split.sequence else g
        y = leave(partial, self.split.peers)
        return y if self.bias is None else y + self.bias


class Options(BaseModel):
    """The options in section ``parallel-layer``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overlap: bool = Field(True, description="overlap communication with weight gradients in the backward")


class TensorLayers(SplitLayers):
    """A factory of layers split over the ranks of one axis."""

    def column_linear(self, spec: LinearSpec, norm: nn.Module | None = None) -> nn.Module:
        """A linear layer whose output features are split, part by part."""
        return ColumnLinear(self.context, self.split, spec, norm)

    def row_linear(self, spec: LinearSpec) -> nn.Module:
        """A linear layer whose input features are split."""
        return RowLinear(self.context, self.split, spec)

    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        """A norm, replicated. Under sequence parallelism a rank sees s/t tokens, so its gradients are partial."""
        norm = make_norm(self.context, kind, size, eps)
        norm.parameter_specs = {name: self.split.whole(spec) for name, spec in norm.parameter_specs.items()}
        return norm

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """Attention of this rank's query heads and the key-value heads that they share."""
        self.check_heads(shape)
        return CoreAttention.shaped(shape, dropout)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves tensor and sequence parallelism; suggests two ranks."""
    return PluginInfo(
        "parallel-layer",
        "tensor",
        options=Options,
        provides=frozenset({"parallel.tensor", "parallel.sequence"}),
        suggests={"parallel.tensor": 2},
    )


@hookimpl
def megatron_run_create_parallel_layer(context: BuildContext, options: Options) -> ParallelLayers:
    """Make the factory for the tensor-parallel ranks of ``context``."""
    peers = context.groups.parallel_group(context.topology, "tensor")
    return TensorLayers(context, LayerSplit(peers, context.sequence_shards > 1, options.overlap))
