"""The options of a model as the planner reads them, and in a line what it reads only approximately.

The planner loads no plugin: it knows the options of ``gpt``, ``deepseek``, ``bert`` and ``t5`` by name. Another model
that has their names is read as a plain decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron_run.errors import InputError
from megatron_run.planning.plans import MAX_LAYERS
from megatron_run_planner.workload import Latent, Model

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
    attention_window: int | None = Field(None, alias="attention.window")
    experts: int = Field(0, alias="experts.count")
    top_k: int = Field(2, alias="experts.top_k")
    expert_ffn_size: int | None = Field(None, alias="experts.ffn_size")
    expert_layer_freq: int = Field(1, ge=1, alias="experts.layer_freq")
    expert_layer_first: int = Field(0, alias="experts.layer_first")
    expert_layer_pattern: tuple[int, ...] = Field((), alias="experts.layer_pattern")
    expert_capacity_factor: float | None = Field(None, alias="experts.capacity_factor")
    shared_expert_ffn_size: int | None = Field(None, alias="experts.shared.ffn_size")
    shared_expert_gate: bool = Field(False, alias="experts.shared.gate")
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


def read_model(word: str, given: Mapping[str, Any], sequence: int, vocabulary: int | None) -> tuple[Model, str]:
    """The model that ``word`` names, and how it was read; an empty text where exactly.

    ``given`` are its options by dotted name, ``vocabulary`` is the data's. Raises :class:`InputError` when sizes are
    missing or none.
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
    model = Model(
        layers=options.num_layers,
        hidden=options.hidden_size,
        heads=options.num_heads,
        sequence=row,
        vocabulary=options.vocab_size or vocabulary or _VOCABULARY,
        kv_heads=0 if options.latent else options.num_kv_heads or 0,
        ffn=ffn,
        gated=options.activation in _GATED,
        head=options.head_size or 0,
        experts=options.experts,
        top_k=options.top_k if options.experts else 0,
        expert_ffn=options.expert_ffn_size or 0,
        flash=True,
        tied=options.tie_embeddings,
        dense_layers=options.dense_layers,
        shared_ffn=(options.shared_expert_ffn_size or 0) if options.experts else 0,
        shared_gate=bool(options.experts and options.shared_expert_gate and options.shared_expert_ffn_size),
        latent=options.latent,
        predictors=options.mtp_layers,
        positions=positions + options.token_types,
        head_extra=options.hidden_size**2 if bert and words else 0,
        pooled=options.hidden_size**2 if bert and options.head in _POOLED else 0,
        logits=words,
        loss_chunks=options.loss_chunks,
        biased=options.bias,
        keeps_gate=options.activation.startswith("geglu"),
        dropout=options.dropout > 0,
        rotary=options.position == "rope" and not options.latent,
        encoder_layers=encoder,
        across=options.encoder_length if encoder else 0,
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
