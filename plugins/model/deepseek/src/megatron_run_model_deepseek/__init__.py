"""Model ``deepseek``: the built-in decoder with latent attention, and if wanted the prediction of further tokens.

Reading order: here the options, which are those of ``gpt`` with other defaults and more; ``latent_attention``,
``prediction``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_run.config.fields import default_of, field_at
from megatron_run.config.values import flat
from megatron_run.contracts import Model, PluginInfo
from megatron_run.contracts.meaning import OF_TRAINING
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions, NormOptions, expert_notices
from megatron_run_engine.nn import Rotary, TransformerSpec, attention_fields, tie_to_word
from megatron_run_model_deepseek.latent_attention import LatentAttention, LatentShape
from megatron_run_model_deepseek.later_tokens import LaterTokens
from megatron_run_model_deepseek.prediction import PredictingChunk, Predictor, loss_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic_core import PydanticCustomError
    from torch import Tensor, nn
    from torch.nn import Parameter

    from megatron_run.contracts import Chunk, ParallelLayers
    from megatron_run.contracts.costs import ModelCosts
    from megatron_run.contracts.schedule import Place
    from megatron_run_engine.nn import Attention, Embedding
    from megatron_run_engine.runtime import BuildContext

__all__ = ["DeepSeek", "DeepSeekOptions"]


class LatentNorm(NormOptions):
    """Norms of the residual stream and the latents."""

    kind: Literal["rmsnorm"] = Field("rmsnorm", description="of the residual stream and the latents")
    eps: float = Field(1e-6, gt=0, description="added to the variance")


class DeepSeekOptions(GptOptions):
    """A decoder with latent attention; the defaults of the network are DeepSeek-V3's, sizes are free."""

    kv_rank: int = Field(ge=1, description="features of the latent from which keys and values are made")
    query_rank: int | None = Field(None, ge=1, description="features of the latent of queries; unset: there is none")
    rope_head_size: int = Field(ge=2, multiple_of=2, description="features of a head that rotate, one key for all")
    nope_head_size: int = Field(ge=1, description="features of a head that do not rotate")
    value_head_size: int = Field(ge=1, description="value features of a head")
    mtp_layers: int = Field(0, ge=0, le=16, description="further tokens that are predicted; 0: the next one alone")
    mtp_loss_coeff: Annotated[float, OF_TRAINING] = Field(0.3, gt=0, description="of the mean loss of further tokens")
    position: Literal["rope"] = Field("rope", description="rotary, of rope_head_size features")
    norm: LatentNorm = Field(LatentNorm(), description="norms of the residual stream and the latents")
    activation: Literal["swiglu"] = Field("swiglu", description="of the feed-forward layer")
    bias: Literal[False] = Field(False, description="there are no biases")
    tie_embeddings: bool = Field(False, description="output layer and embedding share weights")
    dropout: Annotated[float, OF_TRAINING] = Field(
        0.0, ge=0, lt=1, description="on embedding, attention and residual connections"
    )

    def rotation_faults(self) -> Iterator[PydanticCustomError]:
        """None, whatever the size of a head is: ``rope_head_size`` alone rotates, which is even."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _heads_have_both_parts(cls, given: Any) -> Any:
        """The head size follows from its parts; so the hidden size need not divide over the heads."""
        if not isinstance(given, dict):
            return given
        parts = [given.get("rope_head_size"), given.get("nope_head_size")]
        try:
            size = sum(int(str(part)) for part in parts)
        except ValueError:
            return given  # one is missing or no number, and is refused for that
        return {**given, "head_size": size} if given.get("head_size") is None else given

    @model_validator(mode="after")
    def _latents_leave_no_choice(self) -> DeepSeekOptions:
        size = self.rope_head_size + self.nope_head_size
        fixed = {"head_size": size, "num_kv_heads": self.num_heads}
        fixed |= {key: default_of(field) for key in _FIXED if (field := field_at(GptOptions, tuple(key.split("."))))}
        given = flat(self.model_dump())
        faults = [
            f"{key}={given[key]}: with latent attention it is {value}; leave it out"
            for key, value in fixed.items()
            if given[key] not in (value, None)
        ]
        if self.value_head_size > size:
            faults.append(
                f"value_head_size={self.value_head_size} is above rope_head_size + nope_head_size = {size}: "
                "values are padded to the size of keys; set it to at most that"
            )
        if faults:
            raise ValueError("; and ".join(faults))
        return self

    def explicit(self) -> dict[str, Any]:
        """As of ``gpt``; the head size follows from its parts."""
        size = self.rope_head_size + self.nope_head_size
        return super(DeepSeekOptions, self.model_copy(update={"head_size": size})).explicit()

    @property
    def rotated_features(self) -> int:
        """Features of a head that rotate."""
        return self.rope_head_size

    @property
    def latents(self) -> LatentShape:
        """The sizes of latent attention."""
        return LatentShape(
            self.kv_rank, self.query_rank, self.rope_head_size, self.nope_head_size, self.value_head_size
        )

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        """As of ``gpt``, with latent attention and predictors."""
        spec = self.spec(sequence_length, vocab_size)
        found = spec.costs(tied=self.tie_embeddings, attention=self.latents.costs(spec.hidden, spec.heads))
        approximated = ["one projection with latent attention's weights because latents are not timed one by one"]
        if self.mtp_layers:
            approximated.append(
                "a layer and a head for each further token because predictors are not timed by themselves"
            )
        return replace(
            found,
            vectors=found.vectors + self._added_vectors(spec),
            predictors=self.mtp_layers,
            computes_pieces=True,
            approximations=(*found.approximations, *approximated),
        )

    def _added_vectors(self, spec: TransformerSpec) -> int:
        """Values of the norms of all latents, and of all that predictors have: a layer like the last, and three."""
        latents = self.kv_rank + (self.query_rank or 0)
        mixed = spec.experts is not None and spec.layers - 1 in spec.experts.layers
        predictor = spec.layer_vectors(mixed=mixed) + latents + 3 * spec.norm_values
        return spec.layers * latents + self.mtp_layers * predictor

    def spec(self, sequence_length: int, vocab_size: int) -> TransformerSpec:
        """Return the network that these options describe."""
        size = self.rope_head_size + self.nope_head_size
        share = (self.rope_head_size + 0.5) / size  # rounded down to the features that rotate
        return replace(super().spec(sequence_length, vocab_size), head_features=size, rope_fraction=share)


#: Options of ``gpt`` that latent attention fixes at their defaults.
_FIXED = (
    "rope.fraction",
    "rope.pattern",
    "rope.window_theta",
    "attention.window",
    "attention.window_pattern",
    "attention.softcap",
    "attention.qk_norm",
    "attention.qkv_bias",
    "norm.placement",
)


class DeepSeek(Gpt):
    """Builds the chunks of one rank as :class:`Gpt` does, with latent attention."""

    computes_pieces = True

    def __init__(self, context: BuildContext, options: DeepSeekOptions) -> None:
        super().__init__(context, options)
        self._shape, self._predicted, self._coefficient = options.latents, options.mtp_layers, options.mtp_loss_coeff
        if self._predicted:
            self.metric_names = (*self.metric_names, *map(loss_name, range(1, self._predicted + 1)))

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
        word_embedding = layers.vocab_embedding(spec.vocab, spec.hidden, init=spec.init)
        tie_to_word(word_embedding, position, layout, shared)
        rotary, attention = Rotary(context, spec), self.attention_maker(layers)
        predictors = [
            Predictor(context, layers, spec, depth, attention, rotary, word_embedding, output)
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
            word_embedding=word_embedding,
            predictors=predictors,
            coefficient=self._coefficient,
        )

    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str, ...]:
        """As of ``gpt``; predictors attend at the last position, also where it has no layers."""
        found = super().fields(position, layout)
        last = position == len(layout) - 1 and self._predicted
        more = attention_fields(self._context, self._spec) if last else ()
        return (*found, *(name for name in more if name not in found))

    def counts(self, fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The counts of the next token's loss and of those of the predictors."""
        documents = fields.get("documents")
        depths = range(1, self._predicted + 1)
        later = LaterTokens(self._context)
        further = {loss_name(depth): later.counted(fields["loss_mask"], depth, documents).sum() for depth in depths}
        return {**super().counts(fields), **further}

    def make_attention(self, layers: ParallelLayers, layer: int, rotary: Rotary | None) -> Attention:
        """The attention of ``layer``."""
        return LatentAttention(self._context, layers, self._spec, self._shape, layer, rotary)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin: ranks can split its experts."""
    provides = frozenset({"parallel.expert"})
    return PluginInfo("model", "deepseek", options=DeepSeekOptions, provides=provides, check_config=expert_notices)


@hookimpl
def megatron_run_create_model(context: BuildContext, options: DeepSeekOptions) -> Model:
    """Make the model; ``options`` come with the vocabulary filled in."""
    return DeepSeek(context, options)
