"""Layers of plugin parallel-layer=te, made of the stand-in for Transformer Engine."""

from __future__ import annotations

from typing import Any

from megatron_run_engine.nn.parallel import LayerSplit
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_parallel_layer_te import EngineLayers
from megatron_run_parallel_layer_te.library import Engine
from megatron_run_parallel_layer_te.precision import Options
from tests.plugins.engine import recipes as engine_recipes
from tests.plugins.engine import stand_in as engine_stand_in

STAND_IN = Engine(engine_stand_in, engine_recipes, "2.20")


def engine_layers(context: BuildContext, **options: Any) -> EngineLayers:
    """The factory for the ranks of ``context``, as the plugin makes it on a GPU."""
    split = LayerSplit(context.groups.parallel_group(context.topology, "tensor"), context.sequence_shards > 1)
    return EngineLayers(context, split, STAND_IN, Options(**options))


def delayed_layers(context: BuildContext) -> EngineLayers:
    """The factory whose products return their weight gradients late, and do not add them up themselves."""
    return engine_layers(context, fuse_weight_gradients=False, delay_weight_gradients=True)
