"""Model ``deepseek``: the built-in decoder with multi-head latent attention in place of its own.

Reading order: ``options``, ``latent_attention``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import Model, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.builtin.model.gpt import Gpt, expert_notices
from megatron_run_model_deepseek.latent_attention import LatentAttention
from megatron_run_model_deepseek.options import DeepSeekOptions

if TYPE_CHECKING:
    from megatron_run.contracts import ParallelLayers
    from megatron_run_engine.nn import Attention, Rotary
    from megatron_run_engine.runtime.context import BuildContext

__all__ = ["DeepSeek", "DeepSeekOptions"]


class DeepSeek(Gpt):
    """Builds the chunks of one rank as :class:`Gpt` does, with latent attention."""

    def __init__(self, context: BuildContext, options: DeepSeekOptions) -> None:
        super().__init__(context, options)
        self._shape = options.latents

    def make_attention(self, layers: ParallelLayers, layer: int, rotary: Rotary | None) -> Attention:
        """The attention of ``layer``."""
        return LatentAttention(self._context, layers, self._spec, self._shape, layer, rotary)

    def flops_per_token(self, sequence_length: int) -> float:
        """As of ``gpt``, with the matrices of latent attention, and heads whose values have a size of their own."""
        spec, shape = self._spec, self._shape
        usual = spec.head_size * (2 * spec.heads + 2 * spec.kv_heads)
        latent = shape.matmul_parameters(spec.hidden, spec.heads)
        matrices = spec.matmul_parameters + spec.layers * (latent - usual * spec.hidden)
        products = spec.layers * sequence_length * spec.heads * (shape.head + shape.value)
        return 6.0 * matrices + 6.0 * products


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin: ranks can split its experts."""
    provides = frozenset({"parallel.expert"})
    return PluginInfo("model", "deepseek", options=DeepSeekOptions, provides=provides, check_config=expert_notices)


@hookimpl
def megatron_run_create_model(context: BuildContext, options: DeepSeekOptions) -> Model:
    """Make the model; ``options`` come with the vocabulary filled in."""
    return DeepSeek(context, options)
