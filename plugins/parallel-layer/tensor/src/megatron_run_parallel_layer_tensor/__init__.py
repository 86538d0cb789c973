"""Parallel layers ``tensor``: each layer split over the ranks of ``parallel.tensor``, as in Megatron-LM.

A transformer layer needs two all-reduces in its forward and two in its backward (Shoeybi et al. 2019, figure 4). With
``parallel.sequence`` these become pairs of all-gather and reduce-scatter, and norms, dropout and the residual stream
hold s/t of the sequence (Korthikanti et al. 2022).

The building blocks are the engine's, in ``megatron_run_engine.nn.parallel``; ``linear`` makes layers of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from megatron_run.contracts import ParallelLayers, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.nn import CoreAttention, make_norm
from megatron_run_engine.nn.parallel import Split, SplitLayers
from megatron_run_parallel_layer_tensor.linear import ColumnLinear, RowLinear

if TYPE_CHECKING:
    from megatron_run.contracts import AttentionShape, Init, LinearPart, NormKind
    from megatron_run_engine.runtime.context import BuildContext


class Options(BaseModel):
    """The options in section ``parallel-layer``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overlap: bool = Field(True, description="overlap communication with weight gradients in the backward")


class TensorLayers(SplitLayers):
    """A factory of layers split over the ranks of one axis."""

    def column_linear(
        self,
        inputs: int,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
        init: Init,
        norm: nn.Module | None = None,
    ) -> nn.Module:
        """A linear layer whose output features are split, part by part."""
        return ColumnLinear(self.context, self.split, inputs, parts, bias=bias, init=init, norm=norm)

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """A linear layer whose input features are split."""
        return RowLinear(self.context, self.split, inputs, outputs, bias=bias, init=init)

    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        """A norm, replicated. Under sequence parallelism a rank sees s/t tokens, so its gradients are partial."""
        norm = make_norm(self.context, kind, size, eps)
        norm.parameter_specs = {name: self.split.whole(spec) for name, spec in norm.parameter_specs.items()}
        return norm

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """Attention of this rank's query heads and the key-value heads that they share."""
        self.check_heads(shape)
        return CoreAttention.of(shape, dropout)


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
    return TensorLayers(context, Split(peers, context.sequence_shards > 1, options.overlap))
