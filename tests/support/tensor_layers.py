"""Layers split over tensor-parallel ranks, made by name as a run makes them, and a whole model of them on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from megatron_run.config.values import nested
from megatron_run.contracts import ParallelLayers
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.runtime.comm import Groups, create_groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.build_contexts import context_at, prepare
from megatron_run_testing.model import Built

#: Heads, key-value heads and features that divide by 4; a vocabulary that fills three of four ranks.
GPT: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 8,
    "num_kv_heads": 4,
    "vocab_size": 307,
    "init_std": 0.3,
}


def tensor_layers(context: BuildContext, **options: object) -> ParallelLayers:
    """The factory of the plugin ``parallel-layer=tensor``."""
    plugin = load(choose(scan(), "parallel-layer", "tensor", "a test"), "a test")
    plugin = plugin.with_options(plugin.options_model.model_validate(options))
    made: ParallelLayers = plugin.create(context=context, base=None)
    return made


def rank_of(rank: int, world: int) -> tuple[Topology, Groups]:
    """This rank of ``world`` tensor-parallel ones, with its groups. Collective: once a process."""
    topology = Topology(Sizes(tensor=world), rank)
    return topology, create_groups(topology, timedelta(seconds=30))


def gpt_context(
    topology: Topology,
    groups: Groups,
    options: Mapping[str, Any],
    *,
    sequence: bool = False,
    dtype: torch.dtype = torch.float64,
    **train: Any,
) -> BuildContext:
    """The context of a rank that trains a small model with these ``options`` besides :data:`GPT`."""
    model = GptOptions.model_validate(nested({**GPT, **options}))
    return context_at(topology, groups, model, sequence=sequence, dtype=dtype, train=train)


def split_gpt(context: BuildContext, **layer_options: object) -> Built:
    """All of the model on one stage, in training mode, with gradients."""
    options = context.model
    assert isinstance(options, GptOptions)
    model, layers = Gpt(context, options), tensor_layers(context, **layer_options)
    layout = looped_layout(LayoutSpec(1, 1, options.num_layers))
    chunks = (model.build_chunk(0, layout, layers, {}),)
    return Built(model, layout, chunks, prepare(context, chunks)).train(mode=True)
