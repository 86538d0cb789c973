"""Optimizer ``adamw``: replicated data parallelism with all-reduce, and AdamW unless another rule is chosen.

A bucket is reduced as soon as its last gradient has arrived, while the backward is still running. AdamW is Loshchilov
and Hutter 2019 (decoupled weight decay), in PyTorch's fused implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.optim import FlatOptimizer, ShardingStrategy, UpdateOptions, check_update
from megatron_run_engine.runtime.comm import Pending

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Optimizer
    from megatron_run_engine.runtime.comm import ParallelGroup
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.gradients import Bucket


class Replicated(ShardingStrategy):
    """Every data-parallel rank holds all gradients and optimizer state, and computes the same update."""

    def __init__(self, peers: ParallelGroup) -> None:
        self._peers = peers

    def updated(self, bucket: Bucket) -> range:
        """Return the whole bucket."""
        return range(len(bucket.grad))

    def start_reduce(self, bucket: Bucket) -> Pending:
        """Start an all-reduce."""
        return self._peers.start_sum(bucket.grad)

    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        """No-op: every rank has updated all parameters itself."""
        return Pending(values)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("optimizer", "adamw", options=UpdateOptions, check_config=check_update)


@hookimpl
def megatron_run_create_optimizer(context: BuildContext, options: UpdateOptions) -> Optimizer:
    """Make the optimizer."""
    return FlatOptimizer(context, options, Replicated)
