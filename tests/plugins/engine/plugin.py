"""A plugin file: parallel-layer=te with the stand-in in the place of Transformer Engine, so that it runs on the CPU."""

from __future__ import annotations

from megatron_run.contracts import ParallelLayers, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_parallel_layer_te.precision import Options
from tests.plugins.engine.layers import engine_layers


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    served = frozenset({"parallel.tensor", "parallel.sequence"})
    return PluginInfo("parallel-layer", "engine_plugin", options=Options, provides=served)


@hookimpl
def megatron_run_create_parallel_layer(context: BuildContext, options: Options) -> ParallelLayers:
    return engine_layers(context, **options.model_dump())
