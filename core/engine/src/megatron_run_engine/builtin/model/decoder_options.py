"""The options of a decoder: what families of dense models differ in. The defaults are GPT-2's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from megatron_run.contracts import NormKind
from megatron_run.contracts.meaning import FREE_OF_WEIGHTS, NOT_LEARNED, OF_TRAINING
from megatron_run.errors.wording import nearest_divisors, nearest_multiples
from megatron_run_engine.nn import ExpertSpec, TransformerSpec
from megatron_run_engine.nn.spec import (
    Activation,
    Position,
    QkNorm,
    RopeScaling,
    RopeScalingKind,
    check_heads,
)

#: One number for each layer, repeated to the last one.
Pattern = tuple[Literal[0, 1], ...]
Positive = Annotated[float, Field(gt=0)]
#: Above so many turns over the original length a pair of features keeps its frequency, by kind of scaling.
_FAST = {"linear": 1.0, "llama3": 4.0, "yarn": 32.0, "longrope": 1.0}


class DecoderOptions(BaseModel):
    """Options of a decoder; the defaults are GPT-2's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_layers: int = Field(ge=1, description="transformer layers")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    head_size: int | None = Field(None, ge=1, description="features of a head; unset: hidden / heads")
    num_heads: int = Field(ge=1, description="attention heads")
    num_kv_heads: int | None = Field(None, ge=1, description="key-value heads; unset: num_heads")
    ffn_size: int | None = Field(None, ge=1, description="width of the feed-forward layer; unset: 4 x hidden")
    vocab_size: int | None = Field(None, ge=1, description="unpadded token ids; unset: the data's")
    position: Position = Field("learned", description="learned: a vector per position; rope: rotary")
    rope_theta: Annotated[float, FREE_OF_WEIGHTS] = Field(10000.0, gt=0, description="base of the rotation angles")
    rope_fraction: float = Field(1.0, gt=0, le=1, description="share of a head's features that rotate, the first ones")
    rope_pattern: Pattern = Field(
        (), description="1: the layer rotates, 0: it has no positions; repeated; unset: all rotate"
    )
    rope_scaling: Annotated[RopeScalingKind | None, FREE_OF_WEIGHTS] = Field(
        None, description="how rotations stretch to sequences longer than the first training's; unset: not"
    )
    rope_factor: Annotated[float, FREE_OF_WEIGHTS] = Field(
        1.0, ge=1, description="how many times longer; of model.rope_scaling"
    )
    rope_original_length: Annotated[int | None, FREE_OF_WEIGHTS] = Field(
        None, ge=2, validate_default=True, description="length of the first training; all but linear need it"
    )
    rope_low_freq: Annotated[float, FREE_OF_WEIGHTS] = Field(
        1.0, gt=0, description="turns in that length below which rotations slow by the factor"
    )
    rope_high_freq: Annotated[float | None, FREE_OF_WEIGHTS] = Field(
        None, gt=0, description="turns in that length above which rotations stay; unset: 4 for llama3, 32 for yarn"
    )
    rope_attention_factor: Annotated[float | None, FREE_OF_WEIGHTS] = Field(
        None,
        gt=0,
        description="on rotated queries and keys; unset: 0.1 ln(factor) + 1 for yarn, "
        "sqrt(1 + ln(factor) / ln(original length)) for longrope, else 1",
    )
    rope_short_factors: Annotated[tuple[Positive, ...], FREE_OF_WEIGHTS] = Field(
        (),
        description="longrope: times slower each pair turns in texts of at most rope_original_length tokens",
    )
    rope_long_factors: Annotated[tuple[Positive, ...], FREE_OF_WEIGHTS] = Field(
        (), description="longrope: the same in longer ones"
    )
    attention_window: int | None = Field(
        None, ge=1, description="tokens that a query sees, itself the last of them; unset: all before it"
    )
    window_pattern: Pattern = Field(
        (), description="1: the layer has the window, 0: it sees all; repeated; unset: all have it"
    )
    window_rope_theta: float | None = Field(
        None, gt=0, description="base of the angles in layers with a window, unscaled; unset: as in the others"
    )
    attention_scale: float | None = Field(
        None, gt=0, description="on products of query and key; unset: 1/sqrt(head size)"
    )
    attention_softcap: float | None = Field(
        None, gt=0, description="cap c of these products x: c tanh(x/c); unset: none"
    )
    norm: NormKind = Field("layernorm", description="of the residual stream; _1p: times 1 + weight, as in Gemma")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance")
    norm_placement: Literal["pre", "post", "sandwich"] = Field(
        "pre", description="pre: before attention and feed-forward; post: on what they add; sandwich: both"
    )
    qk_norm: QkNorm = Field(
        "none", validate_default=True, description="norm of queries and keys: of each head, or over the full projection"
    )
    activation: Activation = Field("gelu", description="of the feed-forward layer; _tanh: GPT-2's approximation")
    bias: bool = Field(True, description="biases in linear layers")
    qkv_bias: bool | None = Field(None, description="biases of query, key and value; unset: as bias")
    parallel_residual: bool = Field(
        False, description="attention and feed-forward read the same stream, as in GPT-NeoX"
    )
    embedding_scale: float = Field(1.0, gt=0, description="on word embeddings")
    residual_scale: float = Field(1.0, gt=0, description="on what attention and feed-forward add")
    logits_scale: float = Field(1.0, gt=0, description="on logits")
    logits_softcap: float | None = Field(None, gt=0, description="cap c of logits x: c tanh(x/c); unset: none")
    tie_embeddings: bool = Field(True, description="output layer and embedding share weights")
    dropout: Annotated[float, OF_TRAINING] = Field(
        0.1, ge=0, lt=1, description="on embedding, attention and residual connections"
    )
    init_std: Annotated[float, OF_TRAINING] = Field(
        0.02, gt=0, description="of initial matrices; times 1/sqrt(2 x layers) in residual outputs"
    )
    label_smoothing: Annotated[float, OF_TRAINING] = Field(
        0.0, ge=0, lt=1, description="share of the training loss spread over all tokens"
    )
    loss_chunks: Annotated[int, NOT_LEARNED] = Field(
        1,
        ge=1,
        le=256,
        description="pieces of a microbatch whose logits are made one at a time",
    )

    @field_validator("num_heads")
    @classmethod
    def _heads_divide_hidden(cls, heads: int, info: ValidationInfo) -> int:
        hidden, size = info.data.get("hidden_size"), info.data.get("head_size")
        if size is None and hidden is not None:
            check_heads(hidden, heads, ", or set head_size")
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
        hidden, heads, size = (info.data.get(key) for key in ("hidden_size", "num_heads", "head_size"))
        if position != "rope" or hidden is None or heads is None:
            return position
        if size is not None and size % 2:
            raise ValueError(
                f"rope rotates pairs of features and the head size is odd: {size}; set head_size={size + 1}"
            )
        if size is None and hidden // heads % 2:
            raise ValueError(
                f"rope rotates pairs of features and the head size is odd: {hidden} / {heads} = {hidden // heads}; "
                f"set hidden_size to {nearest_multiples(hidden, 2 * heads)}"
            )
        return position

    @field_validator("rope_fraction")
    @classmethod
    def _something_rotates(cls, fraction: float, info: ValidationInfo) -> float:
        size, hidden, heads = (info.data.get(key) for key in ("head_size", "hidden_size", "num_heads"))
        if info.data.get("position") != "rope" or hidden is None or heads is None:
            return fraction
        features = size or hidden // heads
        rotated = int(features * fraction)
        if rotated % 2 or not rotated:
            raise ValueError(
                f"rope rotates pairs of features, and {fraction:g} of {features} is {rotated}; "
                f"set rope_fraction to {2 / features:g} or a multiple of that"
            )
        return fraction

    @field_validator("rope_original_length")
    @classmethod
    def _scales_from_some_length(cls, length: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("rope_scaling")
        if length is None and kind not in (None, "linear"):
            raise ValueError(f"rope_scaling={kind} needs the length of the first training, such as 8192")
        return length

    @field_validator("rope_high_freq")
    @classmethod
    def _fast_is_above_slow(cls, high: float | None, info: ValidationInfo) -> float | None:
        low = info.data.get("rope_low_freq")
        if high is not None and low is not None and high <= low:
            raise ValueError(f"{high:g} turns are not above rope_low_freq={low:g}")
        return high

    @field_validator("qk_norm")
    @classmethod
    def _full_norms_are_rms(cls, qk_norm: QkNorm, info: ValidationInfo) -> QkNorm:
        if qk_norm == "full" and str(info.data.get("norm")).startswith("layernorm"):
            raise ValueError("norms over the full projection are of norm=rmsnorm; set model.norm, or qk_norm=head")
        return qk_norm

    @field_validator("parallel_residual")
    @classmethod
    def _both_halves_have_a_norm(cls, parallel: bool, info: ValidationInfo) -> bool:
        if parallel and info.data.get("norm_placement") == "post":
            raise ValueError("norm_placement=post leaves both halves without a norm before them; set it to pre")
        return parallel

    @field_validator("loss_chunks")
    @classmethod
    def _chunks_are_not_capped(cls, chunks: int, info: ValidationInfo) -> int:
        if chunks > 1 and info.data.get("logits_softcap") is not None:
            raise ValueError("the loss in chunks makes logits without logits_softcap; set loss_chunks=1")
        return chunks

    @model_validator(mode="after")
    def _each_pair_has_its_factors(self) -> Self:
        pairs = self.rotated_features // 2
        lists = ("rope_short_factors", "rope_long_factors") if self.rope_scaling == "longrope" else ()
        counts = {name: len(getattr(self, name)) for name in lists}
        if wrong := [f"{name} has {count} numbers" for name, count in counts.items() if count != pairs]:
            raise ValueError(f"{', '.join(wrong)}, and {pairs} pairs of features rotate")
        return self

    @property
    def rotated_features(self) -> int:
        """Features of a head that rotate."""
        return int((self.head_size or self.hidden_size // self.num_heads) * self.rope_fraction)

    def explicit(self) -> dict[str, Any]:
        """The options by name, with the value that unset ones mean, and patterns as one number for each layer.

        Two models with equal values compute the same, whatever was left unset. Options of what is not used have their
        defaults: those of rotations without them, the window's without one.
        """
        found = self.model_dump()
        found |= {
            "head_size": self.head_size or self.hidden_size // self.num_heads,
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "ffn_size": self.ffn_size or 4 * self.hidden_size,
            "qkv_bias": self.bias if self.qkv_bias is None else self.qkv_bias,
            "rope_pattern": self._spread(self.rope_pattern),
            "window_pattern": self._spread(self.window_pattern) if self.attention_window else (0,) * self.num_layers,
        }
        found["attention_scale"] = self.attention_scale or found["head_size"] ** -0.5
        scaling = self._rope_scaling()
        if scaling is not None:
            found |= {
                "rope_high_freq": scaling.high,
                "rope_attention_factor": scaling.attention_factor,
            }
        elif found["window_rope_theta"] is None:
            found["window_rope_theta"] = self.rope_theta
        unused = set[str]()
        if self.position != "rope":
            unused |= {key for key in found if key.startswith("rope_")} | {"window_rope_theta"}
        if scaling is None:
            unused |= _OF_SCALING
        else:
            unused |= _OF_SCALING - _NUMBERS[scaling.kind]
        if not any(found["window_pattern"]):
            unused |= {"attention_window", "window_rope_theta"}
        return found | {key: type(self).model_fields[key].default for key in unused}

    def _spread(self, pattern: Pattern) -> Pattern:
        """``pattern`` repeated to the last layer, ones for none."""
        return tuple((pattern or (1,))[layer % len(pattern or (1,))] for layer in range(self.num_layers))

    def _layers_of(self, pattern: Pattern) -> frozenset[int]:
        return frozenset(layer for layer, chosen in enumerate(self._spread(pattern)) if chosen)

    def _rope_scaling(self) -> RopeScaling | None:
        kind = self.rope_scaling
        if kind is None:
            return None
        longer, original = math.log(self.rope_factor), self.rope_original_length or 1
        usual = 0.1 * longer + 1 if kind == "yarn" else 1.0
        if kind == "longrope" and longer:
            usual = math.sqrt(1 + longer / math.log(original))
        return RopeScaling(
            kind,
            factor=self.rope_factor,
            original=original,
            low=self.rope_low_freq,
            high=self.rope_high_freq or _FAST[kind],
            attention_factor=self.rope_attention_factor or usual,
            short=self.rope_short_factors,
            long=self.rope_long_factors,
        )

    def dense_spec(self, sequence_length: int, experts: ExpertSpec | None) -> TransformerSpec:
        """Return the network that these options describe, with ``experts`` if given.

        Raises ValueError while ``vocab_size`` is unset.
        """
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
            head_features=self.head_size,
            position=self.position,
            rope_theta=self.rope_theta,
            rope_fraction=self.rope_fraction,
            rope_scaling=self._rope_scaling(),
            rotated_layers=self._layers_of(self.rope_pattern),
            window=self.attention_window,
            window_layers=self._layers_of(self.window_pattern) if self.attention_window else frozenset(),
            window_rope_theta=self.window_rope_theta,
            qk_norm=self.qk_norm,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
            norm=self.norm,
            norm_eps=self.norm_eps,
            norm_placement=self.norm_placement,
            activation=self.activation,
            bias=self.bias,
            qkv_bias=self.qkv_bias,
            parallel_residual=self.parallel_residual,
            embedding_scale=self.embedding_scale,
            residual_scale=self.residual_scale,
            logits_scale=self.logits_scale,
            logits_softcap=self.logits_softcap,
            dropout=self.dropout,
            init_std=self.init_std,
            label_smoothing=self.label_smoothing,
            loss_chunks=self.loss_chunks,
            experts=experts,
        )


_RAMP = {"rope_factor", "rope_original_length", "rope_low_freq", "rope_high_freq", "rope_attention_factor"}
#: The options of each kind of scaling.
_NUMBERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "linear": frozenset({"rope_factor", "rope_attention_factor"}),
        "llama3": frozenset(_RAMP),
        "yarn": frozenset(_RAMP),
        "longrope": frozenset(
            {*_RAMP, "rope_short_factors", "rope_long_factors"} - {"rope_low_freq", "rope_high_freq"}
        ),
    }
)
_OF_SCALING = frozenset[str]().union(*_NUMBERS.values())
