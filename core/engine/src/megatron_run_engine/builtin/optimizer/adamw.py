"""Optimizer ``adamw``: replicated data parallelism with all-reduce; AdamW, or another rule such as SGD or Muon.

A bucket is reduced as soon as its last gradient has arrived, while the backward is still running. AdamW is Loshchilov
and Hutter 2019 (decoupled weight decay), in PyTorch's fused implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.optim import FlatOptimizer, Replicated, UpdateOptions, check_update

if TYPE_CHECKING:
    from megatron_run.contracts import Optimizer
    from megatron_run_engine.runtime.context import BuildContext


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("optimizer", "adamw", options=UpdateOptions, check_config=check_update)


@hookimpl
def megatron_run_create_optimizer(context: BuildContext, options: UpdateOptions) -> Optimizer:
    """Make the optimizer."""
    return FlatOptimizer(context, options, Replicated)
