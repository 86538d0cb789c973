"""Model ``deepseek``: the built-in decoder with latent attention, and if wanted the prediction of further tokens.

Reading order: ``options``, ``latent_attention``, ``prediction``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megatron_run.contracts import Model, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.builtin.model.gpt import Gpt, expert_notices
from megatron_run_engine.nn import Rotary, attention_fields, tie_to_word
from megatron_run_model_deepseek.latent_attention import LatentAttention
from megatron_run_model_deepseek.options import DeepSeekOptions
from megatron_run_model_deepseek.prediction import MTP_LOSS, PredictingChunk, Predictor, predictor_spec

if TYPE_CHECKING:
    from torch import nn
    from torch.nn import Parameter

    from megatron_run.contracts import Chunk, ParallelLayers
    from megatron_run.contracts.actions import Place
    from megatron_run_engine.nn import Attention, Embedding
    from megatron_run_engine.runtime.context import BuildContext

__all__ = ["DeepSeek", "DeepSeekOptions"]


class DeepSeek(Gpt):
    """Builds the chunks of one rank as :class:`Gpt` does, with latent attention."""

    def __init__(self, context: BuildContext, options: DeepSeekOptions) -> None:
        super().__init__(context, options)
        self._shape, self._predicted, self._coefficient = options.latents, options.mtp_layers, options.mtp_loss_coeff
        if self._predicted:
            self.metric_names = (*self.metric_names, MTP_LOSS)

    @property
    def shares_words(self) -> bool:
        """Predictors embed words at the last position, where tied models have them anyway."""
        return super().shares_words or self._predicted > 0

    def make_chunk(
        self,
        position: int,
        layout: tuple[Place, ...],
        layers: ParallelLayers,
        shared: dict[str, Parameter],
        *,
        embedding: Embedding | None,
        output: nn.Module | None,
    ) -> Chunk:
        """The chunk at ``position``; the last one has the predictors."""
        if output is None or not self._predicted:
            return super().make_chunk(position, layout, layers, shared, embedding=embedding, output=output)
        context, spec = self._context, self._spec
        word = layers.vocab_embedding(spec.vocab, spec.hidden, init=spec.init)
        tie_to_word(word, position, layout, shared)
        rotary, attention = Rotary(context, spec), partial(self.make_attention, layers)
        predictors = [
            Predictor(context, layers, spec, depth, attention, rotary, word, output)
            for depth in range(1, self._predicted + 1)
        ]
        return PredictingChunk(
            context,
            spec,
            layers,
            layout[position].layers,
            embedding=embedding,
            output=output,
            routers=self._routers,
            attention=attention,
            word=word,
            predictors=predictors,
            coefficient=self._coefficient,
        )

    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str, ...]:
        """As of ``gpt``; predictors attend at the last position, also where it has no layers."""
        found = super().fields(position, layout)
        last = position == len(layout) - 1 and self._predicted
        more = attention_fields(self._context, self._spec) if last else ()
        return (*found, *(name for name in more if name not in found))

    def make_attention(self, layers: ParallelLayers, layer: int, rotary: Rotary | None) -> Attention:
        """The attention of ``layer``."""
        return LatentAttention(self._context, layers, self._spec, self._shape, layer, rotary)

    def flops_per_token(self, sequence_length: int) -> float:
        """As of ``gpt``, with the matrices of latent attention, and heads whose values have a size of their own."""
        spec, shape = self._spec, self._shape
        usual = spec.head_size * (2 * spec.heads + 2 * spec.kv_heads)
        latent = shape.matmul_parameters(spec.hidden, spec.heads)
        matrices = spec.matmul_parameters + spec.layers * (latent - usual * spec.hidden)
        products = sequence_length * spec.heads * (shape.head + shape.value)
        # A predictor joins two vectors, and has a block and the output layer's products.
        experts = predictor_spec(spec, spec.layers).experts
        features, routed = (spec.ffn, 0) if experts is None else (experts.ffn_features, experts.count)
        routed += experts is not None and experts.shared_gate
        predictor = latent + spec.hidden * (2 * spec.hidden + 3 * features + routed + spec.vocab)
        return 6.0 * (matrices + self._predicted * predictor + (spec.layers + self._predicted) * products)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin: ranks can split its experts."""
    provides = frozenset({"parallel.expert"})
    return PluginInfo("model", "deepseek", options=DeepSeekOptions, provides=provides, check_config=expert_notices)


@hookimpl
def megatron_run_create_model(context: BuildContext, options: DeepSeekOptions) -> Model:
    """Make the model; ``options`` come with the vocabulary filled in."""
    return DeepSeek(context, options)
