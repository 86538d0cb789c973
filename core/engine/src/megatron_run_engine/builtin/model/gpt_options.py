"""The options of model ``gpt``: sizes, what families of decoders differ in, and groups. The defaults are GPT-2's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from megatron_run.config.values import flat
from megatron_run.contracts.meaning import NOT_LEARNED, OF_TRAINING
from megatron_run.contracts.option_groups import fault_at
from megatron_run.errors.wording import nearest_divisors, nearest_multiples
from megatron_run_engine.builtin.model.attention_options import AttentionOptions, NormOptions
from megatron_run_engine.builtin.model.expert_options import ExpertOptions
from megatron_run_engine.builtin.model.rope_options import RopeOptions, chosen_layers
from megatron_run_engine.nn import TransformerSpec
from megatron_run_engine.nn.spec import Activation, Position, check_heads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import PydanticCustomError

    from megatron_run.contracts.costs import ModelCosts


class GptOptions(BaseModel):
    """Options of model ``gpt``; the defaults are GPT-2's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_layers: int = Field(ge=1, description="transformer layers")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    head_size: int | None = Field(None, ge=1, description="features of a head; unset: hidden / heads")
    num_heads: int = Field(ge=1, description="attention heads")
    num_kv_heads: int | None = Field(None, ge=1, description="key-value heads; unset: num_heads")
    ffn_size: int | None = Field(None, ge=1, description="width of the feed-forward layer; unset: 4 x hidden")
    vocab_size: int | None = Field(None, ge=1, description="unpadded token ids; unset: the data's")
    position: Position = Field("learned", description="learned: a vector per position; rope: rotary")
    rope: RopeOptions = Field(RopeOptions(), description="rotary positions")
    attention: AttentionOptions = Field(AttentionOptions(), description="attention")
    norm: NormOptions = Field(NormOptions(), description="norms of the residual stream")
    activation: Activation = Field("gelu", description="of the feed-forward layer; _tanh: GPT-2's approximation")
    bias: bool = Field(True, description="biases in linear layers")
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
        1, ge=1, le=256, description="pieces of a microbatch whose logits are made one at a time"
    )
    experts: ExpertOptions = Field(ExpertOptions(), description="a mixture of experts")

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

    @field_validator("loss_chunks")
    @classmethod
    def _chunks_are_not_capped(cls, chunks: int, info: ValidationInfo) -> int:
        if chunks > 1 and info.data.get("logits_softcap") is not None:
            raise ValueError("the loss in chunks makes logits without logits_softcap; set loss_chunks=1")
        return chunks

    @model_validator(mode="after")
    def _groups_agree(self) -> Self:
        kinds = self.rotation_faults, self._list_faults, self._score_faults, self._norm_faults, self._expert_faults
        for fault in (each for faults in kinds for each in faults()):
            raise fault
        return self

    def rotation_faults(self) -> Iterator[PydanticCustomError]:
        """Where rotations do not fit the size of a head."""
        hidden, heads, size, fraction = self.hidden_size, self.num_heads, self.head_size, self.rope.fraction
        features = size or hidden // heads
        why = "rope rotates pairs of features"
        if self.position == "rope" and features % 2:
            derivation = f"{size}" if size else f"{hidden} / {heads} = {features}"
            fix = f"head_size={size + 1}" if size else f"hidden_size to {nearest_multiples(hidden, 2 * heads)}"
            yield fault_at(self, "position", f"{why} and the head size is odd: {derivation}; set {fix}")
        elif self.position == "rope" and (self.rotated_features % 2 or not self.rotated_features):
            share = f"{fraction:g} of {features} is {self.rotated_features}"
            fix = f"set rope.fraction to {2 / features:g} or a multiple of that"
            yield fault_at(self, "rope.fraction", f"{why}, and {share}; {fix}")

    def _list_faults(self) -> Iterator[PydanticCustomError]:
        pairs = self.rotated_features // 2
        if wrong := self.rope.wrong_lists(pairs):
            yield fault_at(self, "rope.scaling", f"{wrong}, and {pairs} pairs of features rotate")

    def _score_faults(self) -> Iterator[PydanticCustomError]:
        attention = self.attention
        bounded = "softcap" if attention.softcap else "qk_norm" if attention.qk_norm != "none" else ""
        if attention.qk_clip and bounded:
            why = f"with attention.{bounded} scores do not follow the size of weights; leave one of both out"
            yield fault_at(self, "attention.qk_clip", why)

    def _norm_faults(self) -> Iterator[PydanticCustomError]:
        norm = self.norm
        if self.attention.qk_norm == "full" and norm.kind.startswith("layernorm"):
            why = "norms over the full projection are of norm.kind=rmsnorm"
            yield fault_at(self, "attention.qk_norm", f"{why}; set model.norm.kind, or attention.qk_norm=head")
        if self.parallel_residual and norm.placement == "post":
            why = "norm.placement=post leaves both halves without a norm before them; set it to pre"
            yield fault_at(self, "parallel_residual", why)

    def _expert_faults(self) -> Iterator[PydanticCustomError]:
        if self.experts.count and self.parallel_residual:
            why = "parallel_residual=true is for layers without experts; set experts.count=0"
            yield fault_at(self, "experts.count", why)
        if self.experts.count and self.norm.placement == "post":
            why = "norm.placement=post is for layers without experts, whose norm comes first; set it to pre"
            yield fault_at(self, "experts.count", why)
        if wrong := self.experts.wrong_layers(self.num_layers):
            key, why = wrong
            yield fault_at(self, f"experts.{key}", why)

    @property
    def rotated_features(self) -> int:
        """Features of a head that rotate."""
        return int((self.head_size or self.hidden_size // self.num_heads) * self.rope.fraction)

    def explicit(self) -> dict[str, Any]:
        """The options by dotted name, with the value that unset ones mean, and patterns as one number for each layer.

        Two models with equal values compute the same, whatever was left unset. Options of what is not used have their
        defaults: those of rotations without them, the window's without one, those of experts where none has any.
        """
        layers, size = self.num_layers, self.head_size or self.hidden_size // self.num_heads
        ffn = self.ffn_size or 4 * self.hidden_size
        attention = self.attention.explicit(layers, size, bias=self.bias)
        windows = any(attention["window_pattern"])
        experts = self.experts.explicit(layers, ffn)
        if all(experts["layer_pattern"] or (0,)):
            ffn = experts["ffn_size"]  # no layer has its own
        groups = {
            "rope": self.rope.explicit(layers, used=self.position == "rope", windows=windows),
            "attention": attention,
        }
        own = {"head_size": size, "num_kv_heads": self.num_kv_heads or self.num_heads, "ffn_size": ffn}
        mixture = {f"experts.{key}": value for key, value in experts.items()}
        return flat(self.model_dump() | groups | own) | mixture

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        """See :meth:`TransformerSpec.costs`."""
        return replace(self.spec(sequence_length, vocab_size).costs(tied=self.tie_embeddings), computes_pieces=True)

    def spec(self, sequence_length: int, vocab_size: int) -> TransformerSpec:
        """Return the network that these options describe."""
        layers, rope, attention, ffn = self.num_layers, self.rope, self.attention, self.ffn_size or 4 * self.hidden_size
        return TransformerSpec(
            layers=layers,
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads or self.num_heads,
            ffn=ffn,
            vocab=vocab_size,
            sequence_length=sequence_length,
            head_features=self.head_size,
            position=self.position,
            rope_theta=rope.theta,
            rope_fraction=rope.fraction,
            rope_scaling=rope.stretched(),
            rotated_layers=chosen_layers(rope.pattern, layers),
            window=attention.window,
            window_layers=chosen_layers(attention.window_pattern, layers) if attention.window else frozenset(),
            window_rope_theta=rope.window_theta,
            qk_norm=attention.qk_norm,
            scale=attention.scale,
            softcap=attention.softcap,
            norm=self.norm.kind,
            norm_eps=self.norm.eps,
            norm_placement=self.norm.placement,
            activation=self.activation,
            bias=self.bias,
            qkv_bias=attention.qkv_bias,
            parallel_residual=self.parallel_residual,
            embedding_scale=self.embedding_scale,
            residual_scale=self.residual_scale,
            logits_scale=self.logits_scale,
            logits_softcap=self.logits_softcap,
            dropout=self.dropout,
            init_std=self.init_std,
            label_smoothing=self.label_smoothing,
            loss_chunks=self.loss_chunks,
            experts=self.experts.spec(layers, ffn) if self.experts.count else None,
        )
