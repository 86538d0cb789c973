"""The options of a decoder with one feed-forward network a layer."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megatron_run.errors import nearest_divisors, nearest_multiples
from megatron_run_engine.nn import ExpertSpec, TransformerSpec
from megatron_run_engine.nn.spec import Activation, Norm, Position


class DecoderOptions(BaseModel):
    """GPT-2 by its defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_layers: int = Field(ge=1, description="transformer layers")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    num_heads: int = Field(ge=1, description="attention heads")
    num_kv_heads: int | None = Field(None, ge=1, description="key-value heads; unset: num_heads")
    ffn_size: int | None = Field(None, ge=1, description="width of the feed-forward layer; unset: 4 x hidden")
    vocab_size: int | None = Field(None, ge=1, description="unpadded token ids; unset: the data's")
    position: Position = Field("learned", description="learned: a vector per position; rope: rotary")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotation angles")
    norm: Norm = Field("layernorm", description="normalisation before attention, feed-forward and output")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance")
    activation: Activation = Field("gelu", description="of the feed-forward layer; gelu_tanh: GPT-2's approximation")
    bias: bool = Field(True, description="biases in linear layers")
    tie_embeddings: bool = Field(True, description="output layer and embedding share weights")
    dropout: float = Field(0.1, ge=0, lt=1, description="on embedding, attention and residual connections")
    init_std: float = Field(0.02, gt=0, description="of initial matrices; times 1/sqrt(2 x layers) in residual outputs")
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

    def dense_spec(self, sequence_length: int, experts: ExpertSpec | None) -> TransformerSpec:
        """The network these options describe, some of whose layers have ``experts``.

        Raises ValueError while the vocabulary is unknown.
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
            position=self.position,
            rope_theta=self.rope_theta,
            norm=self.norm,
            norm_eps=self.norm_eps,
            activation=self.activation,
            bias=self.bias,
            dropout=self.dropout,
            init_std=self.init_std,
            label_smoothing=self.label_smoothing,
            experts=experts,
        )
