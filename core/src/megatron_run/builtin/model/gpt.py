"""Model ``gpt``: a decoder-only transformer, GPT-2 by its defaults, Llama-like by its options.

Legend: s sequence, b micro batch, h hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megatron_run.contracts import Boundary, Chunk, Model, ParameterSpec, PluginInfo
from megatron_run.errors import nearest_divisors, nearest_multiples
from megatron_run.hookspecs import hookimpl
from megatron_run.nn import DecoderChunk, Embedding, TransformerSpec
from megatron_run.nn.spec import Activation, Norm, Position

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.actions import Place
    from megatron_run.contracts import BuildContext, Microbatch, ParallelLayers

#: The canonical name of the word embedding, which a tied output layer shares.
WORD = "embedding.word.weight"


class GptOptions(BaseModel):
    """Options of model ``gpt``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_layers: int = Field(ge=1, description="transformer layers")
    hidden_size: int = Field(ge=1, description="features of the residual stream")
    num_heads: int = Field(ge=1, description="attention heads")
    num_kv_heads: int | None = Field(None, ge=1, description="key-value heads that queries share; unset: num_heads")
    ffn_size: int | None = Field(None, ge=1, description="features inside the feed-forward layer; unset: 4 x hidden")
    vocab_size: int | None = Field(None, ge=1, description="token ids, unpadded; unset: the data's")
    position: Position = Field("learned", description="learned: a vector per position; rope: rotated heads")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotation angles")
    norm: Norm = Field("layernorm", description="normalisation before attention, feed-forward and output")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance under the root")
    activation: Activation = Field("gelu", description="of the feed-forward layer; gelu_tanh is GPT-2's approximation")
    bias: bool = Field(True, description="biases in linear layers")
    tie_embeddings: bool = Field(True, description="the output layer is the word embedding")
    dropout: float = Field(0.1, ge=0, lt=1, description="of the embedding, attention and residual connections")
    init_std: float = Field(0.02, gt=0, description="of initial matrices; 1/sqrt(2 x layers) of it in residual outputs")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the training loss spread over all tokens")

    @field_validator("num_heads")
    @classmethod
    def _heads_divide_hidden(cls, heads: int, info: ValidationInfo) -> int:
        hidden = info.data.get("hidden_size")
        if hidden is not None and hidden % heads:
            raise ValueError(
                f"hidden_size {hidden} does not divide over {heads} heads: {hidden} / {heads} = {hidden / heads:g}; "
                f"set num_heads to {nearest_divisors(hidden, heads)}, "
                f"or hidden_size to {nearest_multiples(hidden, heads)}"
            )
        return heads

    @field_validator("num_kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, kv_heads: int | None, info: ValidationInfo) -> int | None:
        heads = info.data.get("num_heads")
        if kv_heads is not None and heads is not None and heads % kv_heads:
            raise ValueError(
                f"{heads} heads do not share {kv_heads} key-value heads evenly: {heads} / {kv_heads} = "
                f"{heads / kv_heads:g}; set num_kv_heads to {nearest_divisors(heads, kv_heads)}"
            )
        return kv_heads

    @field_validator("position")
    @classmethod
    def _rope_rotates_pairs(cls, position: Position, info: ValidationInfo) -> Position:
        hidden, heads = info.data.get("hidden_size"), info.data.get("num_heads")
        if position == "rope" and hidden is not None and heads is not None and hidden // heads % 2:
            raise ValueError(
                f"rope rotates pairs of features and the head size is odd: {hidden} / {heads} = {hidden // heads}; "
                f"set hidden_size to {nearest_multiples(hidden, 2 * heads)}"
            )
        return position

    def spec(self, sequence_length: int) -> TransformerSpec:
        """The network these options describe. Raises ValueError while the vocabulary is unknown."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is unset: fill it in from the data first")
        return TransformerSpec(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads or self.num_heads,
            ffn=self.ffn_size or 4 * self.hidden_size,
            vocab=self.vocab_size,
            sequence_length=sequence_length,
            position=self.position,
            rope_theta=self.rope_theta,
            norm=self.norm,
            norm_eps=self.norm_eps,
            activation=self.activation,
            bias=self.bias,
            dropout=self.dropout,
            init_std=self.init_std,
            label_smoothing=self.label_smoothing,
        )


class Gpt(Model):
    """Builds the chunks of one rank, and ties the output layer to the word embedding across them."""

    def __init__(self, context: BuildContext, options: GptOptions) -> None:
        self._context, self._options = context, options
        self._spec = options.spec(context.train.sequence_length)

    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, Parameter]
    ) -> Chunk:
        """Build the blocks of ``layout[position]``, with the embedding at the first and the head at the last."""
        spec, last = self._spec, len(layout) - 1
        embedding = output = None
        if position == 0:
            embedding = Embedding(self._context, spec, layers)
            self._tie(embedding.word, 0, layout, shared)
        if position == last:
            tied = shared.get(WORD) if self._options.tie_embeddings else None
            output = layers.output_layer(spec.vocab, spec.hidden, init=spec.init, weight=tied)
            self._tie(output, last, layout, shared)
        indices = layout[position].layers
        return DecoderChunk(self._context, spec, layers, indices, embedding=embedding, output=output)

    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str, ...]:
        """Tokens enter at the first position; labels and their mask at the last."""
        first = ("tokens",) if position == 0 else ()
        return first + (("labels", "loss_mask") if position == len(layout) - 1 else ())

    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        """The residual stream, [s, b, h], of which a rank holds its part of s under sequence parallelism."""
        length = sequence_length // self._context.sequence_shards
        return Boundary((length, micro_batch_size, self._spec.hidden), self._context.dtypes.param)

    def flops_per_token(self, sequence_length: int) -> float:
        """See :attr:`TransformerSpec.flops_per_token`."""
        return replace(self._spec, sequence_length=sequence_length).flops_per_token

    def _tie(self, module: Any, position: int, layout: tuple[Place, ...], shared: dict[str, Parameter]) -> None:
        """Make the word matrix of ``module`` one with the other end's: the same Parameter, or copies kept equal.

        ``module`` is a factory's: all that is known of it is its ``weight`` and its ``parameter_specs``. Copies on two
        stages hold partial gradients, which the optimizer sums over the two; the first one counts.
        """
        if not self._options.tie_embeddings:
            return
        module.weight = shared.setdefault(WORD, module.weight)
        first, last = layout[0].stage, layout[-1].stage
        specs: dict[str, ParameterSpec] = module.parameter_specs
        specs["weight"] = replace(
            specs["weight"],
            name=WORD,
            tie="embedding" if len(layout) > 1 else "",
            partial_over="tie" if first != last else None,
            counted=position == 0 or first == last,
        )


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("model", "gpt", options=GptOptions)


@hookimpl
def megatron_run_create_model(context: BuildContext, options: GptOptions) -> Model:
    """Make the model; ``options`` come with the vocabulary filled in."""
    return Gpt(context, options)
