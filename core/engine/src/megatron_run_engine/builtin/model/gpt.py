"""Model ``gpt``: a decoder-only transformer, GPT-2 by default, Llama-like by options.

Its options and costs need no torch, so that a plan loads none; the network (``decoder``) is loaded when it is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import Model, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run.lazy import lazy_names
from megatron_run_engine.builtin.model.attention_options import AttentionOptions, NormOptions
from megatron_run_engine.builtin.model.expert_notices import expert_notices
from megatron_run_engine.builtin.model.expert_options import ExpertOptions
from megatron_run_engine.builtin.model.gpt_options import GptOptions
from megatron_run_engine.builtin.model.rope_options import RopeOptions

if TYPE_CHECKING:
    from megatron_run_engine.builtin.model.decoder import Gpt
    from megatron_run_engine.runtime.context import BuildContext

__all__ = [
    "AttentionOptions",
    "ExpertOptions",
    "Gpt",
    "GptOptions",
    "NormOptions",
    "RopeOptions",
    "expert_notices",
]
__getattr__, *_ = lazy_names(__name__, {"megatron_run_engine.builtin.model.decoder": ("Gpt",)})


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin: ranks can split its experts."""
    return PluginInfo(
        "model", "gpt", options=GptOptions, provides=frozenset({"parallel.expert"}), check_config=expert_notices
    )


@hookimpl
def megatron_run_create_model(context: BuildContext, options: GptOptions) -> Model:
    """Make the model; ``options`` come with the vocabulary filled in."""
    from megatron_run_engine.builtin.model.decoder import Gpt

    return Gpt(context, options)
