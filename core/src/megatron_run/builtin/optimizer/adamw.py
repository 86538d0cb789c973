"""Optimizer ``adamw``: replicated data parallelism with all-reduce, and AdamW unless told otherwise.

Buckets leave as soon as their last gradient has arrived, while the backward goes on. AdamW is Loshchilov and Hutter
2019 (decoupled weight decay), PyTorch's fused implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.comm import Pending
from megatron_run.contracts import PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run.optim import FlatOptimizer, Sharing, UpdateOptions, check_update

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.comm import Peers
    from megatron_run.contracts import BuildContext, Optimizer
    from megatron_run.gradients import Bucket


class Replicated(Sharing):
    """Every data-parallel rank holds all gradients and all optimizer state, and makes the same update."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def updated(self, bucket: Bucket) -> range:
        """All of it."""
        return range(len(bucket.grad))

    def start_reduce(self, bucket: Bucket) -> Pending:
        """An all-reduce."""
        return self._peers.start_sum(bucket.grad)

    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        """Nothing: every rank has updated everything."""
        return Pending(values)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("optimizer", "adamw", options=UpdateOptions, check_config=check_update)


@hookimpl
def megatron_run_create_optimizer(context: BuildContext, options: UpdateOptions) -> Optimizer:
    """Make the optimizer."""
    return FlatOptimizer(context, options, Replicated)
