"""The options of a model as the planner reads them, and in a line what it reads only approximately.

The planner loads no plugin: it knows the options of ``gpt``, ``deepseek``, ``bert`` and ``t5`` by name. Another model
that has their names is read as a plain decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron_run.contracts.costs import AttentionCosts, Divided, FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.errors import InputError
from megatron_run.planning.plans import MAX_LAYERS


class Latent(NamedTuple):
    """Sizes."""

    keys: int
    queries: int
    rotating: int
    plain: int
    value: int


#: The models whose options are known, with the defaults in which they differ from ``gpt``.
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "gpt": {},
    "deepseek": {"activation": "swiglu", "tie_embeddings": False, "position": "rope", "dropout": 0.0},
    "bert": {"token_types": 2},
    "t5": {"activation": "geglu_tanh", "position": "biases", "head_size": 64, "encoder_length": 512},
}
#: Heads of a model that has no option of that name.
_FOREIGN: Mapping[str, Any] = {"num_heads": 1}
#: GPT-2's, where nothing says it.
_VOCABULARY = 50257
#: Activations of two matrices in.
_GATED = ("swiglu", "geglu", "geglu_tanh")
#: Heads of bert that make logits over the vocabulary.
_OVER_WORDS = ("masked", "pretraining")
#: Heads of bert with a matrix for the first token.
_POOLED = ("pretraining", "classification", "choice")


class _Options(BaseModel):
    """The options that decide time and memory; others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int | None = None
    head_size: int | None = None
    ffn_size: int | None = None
    vocab_size: int | None = None
    activation: str = "gelu"
    bias: bool = True
    position: str = "learned"
    max_positions: int | None = None
    token_types: int = 0
    tie_embeddings: bool = True
    attention_window: int | None = None
    experts: int = 0
    top_k: int = 2
    expert_ffn_size: int | None = None
    expert_layer_freq: int = Field(1, ge=1)
    expert_layer_first: int = 0
    expert_layer_pattern: tuple[int, ...] = ()
    expert_capacity_factor: float | None = None
    shared_expert_ffn_size: int | None = None
    shared_expert_gate: bool = False
    kv_rank: int | None = None
    query_rank: int | None = None
    rope_head_size: int = Field(0, ge=0)
    nope_head_size: int = Field(0, ge=0)
    value_head_size: int = Field(0, ge=0)
    mtp_layers: int = 0
    loss_chunks: int = Field(1, ge=1, le=256)
    dropout: float = 0.1
    head: str = "masked"
    choices: int = Field(1, ge=1)
    encoder_layers: int | None = Field(None, ge=1)
    encoder_length: int = 0

    @field_validator("expert_layer_pattern", mode="before")
    @classmethod
    def _as_written(cls, pattern: object) -> object:
        """The command line has numbers with commas."""
        return [part for part in str(pattern).split(",") if part] if isinstance(pattern, str | int) else pattern

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers without experts, where others have them."""
        pattern, freq, first = self.expert_layer_pattern, self.expert_layer_freq, self.expert_layer_first
        if pattern:
            mixed = {n for n in range(first, self.num_layers) if pattern[n % len(pattern)]}
        else:
            mixed = set(range(-(-first // freq) * freq, self.num_layers, freq))
        return tuple(n for n in range(self.num_layers) if n not in mixed) if self.experts else ()

    @property
    def latent(self) -> Latent | None:
        """Latent attention, where the model has it."""
        if not self.kv_rank:
            return None
        sizes = self.rope_head_size, self.nope_head_size, self.value_head_size
        return Latent(self.kv_rank, self.query_rank or 0, *sizes)


def read_model(word: str, given: Mapping[str, Any], sequence: int, vocabulary: int | None) -> tuple[ModelCosts, str]:
    """The model that ``word`` names, with the options ``given``, and how it was read; an empty text where exactly.

    ``vocabulary`` is the data's. Raises :class:`InputError` when sizes are missing or none.
    """
    try:
        options = _Options.model_validate({**KNOWN.get(word, _FOREIGN), **given})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"model.{name}: {first['msg'].lower()}", fix="plan needs num_layers, hidden_size and num_heads"
        ) from None
    if options.choices > sequence:
        raise InputError(
            f"model.choices={options.choices} is more than train.sequence_length={sequence}",
            why="each choice is a part of the sequence",
        )
    if options.kv_rank and not (options.value_head_size and options.rope_head_size + options.nope_head_size):
        sizes = "model.rope_head_size, model.nope_head_size and model.value_head_size"
        raise InputError("latent attention has heads without a size", fix=f"set {sizes}")
    row, bert = sequence // options.choices, word == "bert"
    positions = (options.max_positions or row) if options.position == "learned" else 0
    words = not bert or options.head in _OVER_WORDS
    encoder, ffn = 0, options.ffn_size or 0
    if word == "t5":
        encoder = options.num_layers // 2 if options.encoder_layers is None else options.encoder_layers
        ffn = ffn or 2 * round(4 * options.hidden_size / 3)
    hidden, heads = options.hidden_size, options.num_heads
    size = options.head_size or hidden / heads
    rotary = options.position == "rope" and not options.latent
    attention = AttentionCosts.plain(heads, size, options.num_kv_heads or 0, rotary=rotary)
    if options.latent:
        keys, queries, rotating, plain, value = options.latent
        wide = heads * (rotating + plain)
        query = queries * (hidden + wide) if queries else hidden * wide
        weights = query + hidden * (keys + rotating) + keys * heads * (plain + value)
        attention = AttentionCosts(heads, (rotating + plain + value) / 2, weights / hidden, heads * value, heads)
    matrices = 3 if options.activation in _GATED else 2
    gate = options.activation.startswith("geglu")
    dense = FeedForwardCosts(ffn or 4 * hidden, matrices, gate)
    mixed = dense
    if options.experts:
        mixed = FeedForwardCosts(
            options.expert_ffn_size or ffn or 4 * hidden,
            matrices,
            gate,
            options.experts,
            options.top_k,
            options.shared_expert_ffn_size or 0,
            bool(options.shared_expert_gate and options.shared_expert_ffn_size),
        )
    more = (options.dropout > 0, options.bias)
    without = set(options.dense_layers)
    layers = [
        LayerCosts(hidden, row, (attention, dense if layer in without else mixed), *more)
        for layer in range(options.num_layers)
    ]
    if encoder:
        reading = LayerCosts(hidden, options.encoder_length, (attention, dense), *more)
        across = AttentionCosts.over(options.encoder_length, heads, size)
        writing = LayerCosts(hidden, row, (attention, across, dense), *more)
        layers = [reading] * encoder + [writing] * (options.num_layers - encoder)
    divided = [
        Divided(heads, "attention heads (model.num_heads)"),
        Divided((not options.latent and options.num_kv_heads) or heads, "key-value heads (model.num_kv_heads)"),
    ]
    for feed in dict.fromkeys(feed for layer in layers for feed in layer.feeds):
        key = "expert_ffn_size" if feed.experts and options.expert_ffn_size else "ffn_size"
        divided.append(Divided(feed.features, f"features of the feed-forward layer (model.{key})"))
        divided.append(Divided(feed.shared, "features of the shared expert (model.shared_expert_ffn_size)"))
    model = ModelCosts(
        tuple(layers),
        options.vocab_size or vocabulary or _VOCABULARY,
        tied=options.tie_embeddings,
        positions=positions + options.token_types,
        head_weights=hidden**2 if bert and words else 0,
        pooled=hidden**2 if bert and options.head in _POOLED else 0,
        logits=words,
        loss_chunks=options.loss_chunks,
        predictors=options.mtp_layers,
        embedded=row + options.encoder_length if encoder else 0,
        divided=tuple(divided),
    )
    told = options.vocab_size or vocabulary
    return model, "; ".join(_approximations(word, options, told))


def _approximations(word: str, options: _Options, vocabulary: int | None) -> Iterator[str]:
    """The model for estimates of time or activations, and why; parameters and FLOPs are exact for the known models."""
    if word not in KNOWN:
        yield f"a plain decoder because model={word} is none of {', '.join(KNOWN)}"
    if vocabulary is None:
        yield f"{_VOCABULARY} words because neither model.vocab_size nor data.vocab_size says how many"
    if options.experts:
        yield "evenly loaded experts because no routing is known"
    if options.expert_capacity_factor:
        yield "experts without a capacity because drops follow the routing"
    if options.latent:
        yield "one projection with latent attention's weights because latents are not timed one by one"
    if options.attention_window:
        yield "full attention because windows are not timed"
    if word == "t5":
        yield "attention without its biases because what they cost is the kernel's"
    if options.mtp_layers:
        yield "a layer and a head for each further token because predictors are not timed by themselves"
    if options.choices > 1:
        yield f"rows of a {options.choices}th of the sequence, one a sample, because choices are not batched"
