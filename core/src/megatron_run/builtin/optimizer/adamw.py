"""Optimizer ``adamw``: replicated data parallelism with all-reduce, and AdamW.

Buckets leave as soon as their last gradient has arrived, while the backward goes on. AdamW is Loshchilov and Hutter
2019 (decoupled weight decay), PyTorch's fused implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Optimizer, PluginInfo
from megatron_run.gradients import build_buckets, main_grad
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import BuildContext, Chunk, ParamInfo
    from megatron_run.gradients import Bucket


class AdamWOptions(BaseModel):
    """Options of optimizer ``adamw``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of the first and second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")


class AdamW(Optimizer):
    """Every data-parallel rank holds all gradients and all optimizer state."""

    def __init__(self, context: BuildContext, options: AdamWOptions) -> None:
        self._groups, self._topology, self._options = context.groups, context.topology, options
        self._device, self._grad_dtype = context.device, context.dtypes.grad
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Parameter, Bucket] = {}
        self._waiting: dict[Bucket, set[Parameter]] = {}
        self._sent: dict[Bucket, dist.Work | None] = {}
        self._grad_scale = 1.0
        self._update: torch.optim.AdamW | None = None

    def attach(self, chunks: Sequence[Chunk], infos: Sequence[dict[Parameter, ParamInfo]], grad_scale: float) -> None:
        """Lay out the buckets and make the two parameter groups, with and without weight decay."""
        self._grad_scale = grad_scale
        self._buckets = build_buckets(infos, self._topology.sizes.data, self._grad_dtype)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        described = {p: info for chunk in infos for p, info in chunk.items()}
        by_decay = {decay: [p for p, info in described.items() if info.decay == decay] for decay in (True, False)}
        groups = [{"params": members, "decays": decay} for decay, members in by_decay.items() if members]
        if groups:  # a stage may hold no layer
            self._update = torch.optim.AdamW(groups, betas=self._options.betas, eps=self._options.eps, fused=True)

    def zero_grad(self) -> None:
        """Clear the buckets; nothing has arrived and nothing is sent."""
        for bucket in self._buckets:
            bucket.grad.zero_()
        self._waiting = {bucket: set(bucket.parameters) for bucket in self._buckets}
        self._sent = {}

    def grad_ready(self, parameter: Parameter) -> None:
        """Send the complete buckets at the head of this chunk's sequence, never out of it."""
        bucket = self._bucket_of[parameter]
        self._waiting[bucket].discard(parameter)
        if bucket.chunk is None:
            return  # tied: other chunks may still add to it
        for waiting in self._sequence(bucket.chunk):
            if self._waiting[waiting]:
                return
            self._send(waiting)

    def start_grad_sync(self, chunk: int) -> None:
        """Send what is left of ``chunk``."""
        for bucket in self._sequence(chunk):
            self._send(bucket)

    def finish_grad_sync(self) -> None:
        """Send tied buckets, wait for every reduction, then make partial gradients whole."""
        for bucket in self._buckets:
            self._send(bucket)
        for work in self._sent.values():
            if work is not None:
                work.wait()
        for bucket in self._buckets:
            axis = next(iter(bucket.infos.values())).partial_over
            if axis is not None:
                self._groups.sum_(bucket.grad, axis)

    def unscale_(self, factor: Tensor) -> Tensor:
        """Multiply by ``factor`` and look for non-finite values, in one pass over each bucket."""
        found_inf = torch.zeros(1, device=factor.device)
        grads = [bucket.grad for bucket in self._buckets]
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
        return self._groups.max_(found_inf, "world")

    def clip_(self, max_norm: float) -> Tensor:
        """Clip by the global norm; data-parallel replicas are counted on the first of them."""
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        if self._topology.data_rank == 0:
            for bucket in self._buckets:
                for parameter, info in bucket.infos.items():
                    if info.counted:
                        squares += torch.linalg.vector_norm(main_grad(parameter), dtype=torch.float64).square()
        norm = self._groups.sum_(squares, "world").sqrt()
        if max_norm > 0:
            coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
            for bucket in self._buckets:
                bucket.grad.mul_(coefficient)
        return norm.float()

    def step(self, lr: float, weight_decay: float) -> None:
        """Update every parameter from its ``main_grad``."""
        if self._update is None:
            return
        for group in self._update.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
            for parameter in group["params"]:
                parameter.grad = main_grad(parameter)
        self._update.step()
        self._update.zero_grad(set_to_none=True)

    def start_param_sync(self) -> None:
        """Start nothing: every replica made the same update."""

    def ensure_ready(self, parameters: Iterable[Parameter]) -> None:
        """Return at once: parameters are always up to date."""

    def _sequence(self, chunk: int) -> list[Bucket]:
        return [bucket for bucket in self._buckets if bucket.chunk == chunk]

    def _send(self, bucket: Bucket) -> None:
        if bucket in self._sent:
            return
        if self._grad_scale != 1.0:
            bucket.grad.mul_(self._grad_scale)
        self._sent[bucket] = self._groups.start_sum(bucket.grad, "data")


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("optimizer", "adamw", options=AdamWOptions)


@hookimpl
def megatron_run_create_optimizer(context: BuildContext, options: AdamWOptions) -> Optimizer:
    """Make the optimizer."""
    return AdamW(context, options)
