"""Parallel layers ``te``: those of plugin ``tensor``, computed by NVIDIA Transformer Engine.

The split and the names of weights are the same; the GPU kernels differ: norm and product in one, fused attention, FP8.
The ends of the model, the loss and dropout are megatron_run's own. Transformer Engine is imported when a run starts,
never before.

Reading order: ``library`` (finding it), ``shapes`` (planning without it), ``precision`` (options, FP8),
``layers``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import ParallelLayers, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.nn.parallel import LayerSplit, SplitLayers
from megatron_run_parallel_layer_te.layers import ColumnLinear, CoreAttention, Norm, RowLinear, Tools
from megatron_run_parallel_layer_te.library import Engine, find_engine
from megatron_run_parallel_layer_te.precision import Options, Precision, check_config, check_gpu

if TYPE_CHECKING:
    from torch import nn

    from megatron_run.contracts import AttentionShape, LinearSpec, NormKind
    from megatron_run_engine.runtime import BuildContext


class EngineLayers(SplitLayers):
    """A factory of layers made from Transformer Engine's modules."""

    def __init__(self, context: BuildContext, split: LayerSplit, engine: Engine, options: Options) -> None:
        super().__init__(context, split)
        self._tools = Tools(context, split, engine, options, Precision(engine, options, split, context.train))

    def column_linear(self, spec: LinearSpec, norm: nn.Module | None = None) -> nn.Module:
        """A linear layer whose output features are split, part by part; a norm of this factory is fused into it."""
        return ColumnLinear(self._tools, spec, norm)

    def row_linear(self, spec: LinearSpec) -> nn.Module:
        """A linear layer whose input features are split."""
        return RowLinear(self._tools, spec)

    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        """A norm, replicated on every rank."""
        return Norm(self._tools, kind, size, eps)

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """Attention of this rank's heads."""
        self.check_heads(shape)
        return CoreAttention(self._tools, shape, dropout)

    def forward_pass(self) -> AbstractContextManager[object]:
        """An FP8 region around the forward for delayed scaling; a null context otherwise."""
        return self._tools.precision.forward_pass()


def check_device(device: str, options: Options) -> None:
    """Raise :class:`megatron_run.errors.PluginError` unless ``device`` supports ``options``."""
    check_gpu(find_engine(torch.device(device)), options)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves tensor and sequence parallelism, on a GPU with Transformer Engine."""
    return PluginInfo(
        "parallel-layer",
        "te",
        options=Options,
        provides=frozenset({"parallel.tensor", "parallel.sequence"}),
        check_config=check_config,
        check_device=check_device,
    )


@hookimpl
def megatron_run_create_parallel_layer(context: BuildContext, options: Options) -> ParallelLayers:
    """Make the factory for the tensor-parallel ranks of ``context``."""
    engine = find_engine(context.device)
    split = LayerSplit(context.groups.parallel_group(context.topology, "tensor"), context.sequence_shards > 1)
    if context.device.type == "cuda":
        check_gpu(engine, options)  # again for this rank's GPU: in check_device another one may have been current
    return EngineLayers(context, split, engine, options)
