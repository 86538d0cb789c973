"""One layer replaced, the rest kept: an RMS norm whose sum is taken in at least fp32, whatever the activations are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_run.contracts import (
    BuildContext,
    Init,
    NormKind,
    ParallelLayers,
    ParameterSpec,
    PluginInfo,
    StackedLayers,
)
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.nn import empty_parameter


class PreciseRmsNorm(nn.Module):
    def __init__(self, context: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(context, size)
        own_tokens = context.sequence_shards > 1  # then this rank's gradient is one part of a sum
        spec = ParameterSpec(Init("ones"), partial_over="tensor" if own_tokens else None)
        self.parameter_specs = {"weight": spec}

    def forward(self, x: Tensor) -> Tensor:
        """[*, h] -> [*, h]."""
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        root = (precise.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (precise * root).to(x.dtype) * self.weight


class PreciseNorms(StackedLayers):
    def __init__(self, context: BuildContext, base: ParallelLayers) -> None:
        super().__init__(base)
        self._context = context

    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        return PreciseRmsNorm(self._context, size, eps) if kind == "rmsnorm" else self.base.norm(kind, size, eps)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("parallel-layer", "precise-norm")


@hookimpl
def megatron_run_create_parallel_layer(context: BuildContext, base: ParallelLayers) -> ParallelLayers:
    return PreciseNorms(context, base)
