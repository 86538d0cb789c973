"""Stochastic gradient descent with replicated data parallelism; every gradient is sent at the end of the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run.contracts import BuildContext, Chunk, Optimizer, ParamInfo, PluginInfo
from megatron_run.gradients import build_buckets, main_grad
from megatron_run.hookspecs import hookimpl


class Sgd(Optimizer):
    def __init__(self, context: BuildContext) -> None:
        self._groups, self._topology, self._device = context.groups, context.topology, context.device

    def attach(self, chunks: Sequence[Chunk], infos: Sequence[dict[Parameter, ParamInfo]], grad_scale: float) -> None:
        self._buckets = build_buckets(infos, shards=self._topology.sizes.data)
        self._grad_scale = grad_scale

    def zero_grad(self) -> None:
        for bucket in self._buckets:
            bucket.grad.zero_()

    def grad_ready(self, parameter: Parameter) -> None:
        """Wait for the end of the step."""

    def start_grad_sync(self, chunk: int) -> None:
        """Wait for the end of the step."""

    def finish_grad_sync(self) -> None:
        for bucket in self._buckets:
            self._groups.sum_(bucket.grad.mul_(self._grad_scale), "data")
            axis = next(iter(bucket.infos.values())).partial_over
            if axis is not None:
                self._groups.sum_(bucket.grad, axis)

    def unscale_(self, factor: Tensor) -> Tensor:
        found_inf = torch.zeros(1, device=self._device)
        for bucket in self._buckets:
            found_inf += bucket.grad.mul_(factor).isfinite().logical_not().any()
        return self._groups.max_(found_inf, "world")

    def clip_(self, max_norm: float) -> Tensor:
        squares = torch.zeros(1, device=self._device)
        for parameter, info in self._parameters():
            if info.counted and self._topology.data_rank == 0:
                squares += main_grad(parameter).square().sum()
        norm = self._groups.sum_(squares, "world").sqrt()
        if max_norm:
            for bucket in self._buckets:
                bucket.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        for parameter, info in self._parameters():
            parameter.mul_(1 - lr * weight_decay if info.decay else 1)
            parameter.sub_(lr * main_grad(parameter))

    def start_param_sync(self) -> None:
        """Start nothing: every replica made the same update."""

    def ensure_ready(self, parameters: Iterable[Parameter]) -> None:
        """Return at once: parameters are always up to date."""

    def _parameters(self) -> Iterable[tuple[Parameter, ParamInfo]]:
        return (item for bucket in self._buckets for item in bucket.infos.items())


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("optimizer", "sgd")


@hookimpl
def megatron_run_create_optimizer(context: BuildContext) -> Optimizer:
    return Sgd(context)
