"""Optimizer ``lion``: the rule of ``lion.py`` beside this module, after an all-reduce of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from megatron_run.contracts import PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.optim import FlatOptimizer, Replicated, UpdateOptions, check_update

if TYPE_CHECKING:
    from megatron_run.contracts import Optimizer
    from megatron_run_engine.runtime import BuildContext


class LionOptions(UpdateOptions):
    rule: str = "megatron_run_optimizer_lion.lion:Lion"
    rule_options: dict[str, Any] = Field({"beta1": 0.95, "beta2": 0.98}, description="beta1 and beta2")


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("optimizer", "lion", options=LionOptions, check_config=check_update)


@hookimpl
def megatron_run_create_optimizer(context: BuildContext, options: LionOptions) -> Optimizer:
    return FlatOptimizer(context, options, Replicated)
