"""The options of model ``t5``; the defaults are those of T5 1.1's base size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megatron_run.config.values import flat
from megatron_run.contracts.costs import AttentionCosts
from megatron_run.contracts.meaning import OF_TRAINING
from megatron_run.contracts.option_groups import Group
from megatron_run_engine.nn import TransformerSpec

if TYPE_CHECKING:
    from megatron_run.contracts.costs import ModelCosts


class NormOptions(Group):
    """The norms."""

    eps: float = Field(1e-6, gt=0, description="added to the mean square")


class T5Options(BaseModel):
    """The keys of section ``model`` when it uses t5."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_layers: int = Field(24, ge=2, description="layers of encoder and decoder together")
    encoder_layers: int | None = Field(None, ge=1, description="how many of them are the encoder's; unset: half")
    hidden_size: int = Field(768, ge=1, description="width of the residual streams")
    num_heads: int = Field(12, ge=1, description="attention heads")
    head_size: int = Field(64, ge=1, description="features of a head")
    ffn_size: int | None = Field(None, ge=1, description="width of the feed-forward layer; unset: 8/3 x hidden, even")
    vocab_size: int | None = Field(None, ge=1, description="unpadded token ids; unset: the data's")
    encoder_length: int = Field(512, ge=1, description="tokens that the encoder reads, as the data's")
    position_buckets: int = Field(32, ge=4, description="biases of a head by the distance of query and key")
    position_distance: int = Field(128, ge=2, description="from this distance on all share one bias")
    activation: Literal["geglu_tanh", "relu"] = Field(
        "geglu_tanh", description="of the feed-forward layer; relu: the first T5's"
    )
    tie_embeddings: bool = Field(True, description="the output layer is the embedding, its logits over sqrt(hidden)")
    norm: NormOptions = Field(NormOptions(), description="norms")
    dropout: Annotated[float, OF_TRAINING] = Field(
        0.1, ge=0, lt=1, description="on embeddings, attention and residual connections"
    )
    init_std: Annotated[float | None, OF_TRAINING] = Field(
        None, gt=0, description="of initial matrices but the embedding, which has 1; unset: 1/sqrt(hidden)"
    )

    @field_validator("encoder_layers")
    @classmethod
    def _leaves_a_decoder(cls, encoder: int | None, info: ValidationInfo) -> int | None:
        layers = info.data.get("num_layers")
        if encoder is not None and layers is not None and encoder >= layers:
            raise ValueError(f"{encoder} of {layers} layers leave none for the decoder; raise num_layers")
        return encoder

    @field_validator("position_buckets")
    @classmethod
    def _both_directions(cls, buckets: int) -> int:
        if buckets % 4:
            raise ValueError(f"{buckets} is no multiple of 4: half of the encoder's are for keys behind the query")
        return buckets

    @field_validator("position_distance")
    @classmethod
    def _beyond_single_distances(cls, distance: int, info: ValidationInfo) -> int:
        buckets = info.data.get("position_buckets")
        if buckets is not None and distance <= buckets // 2:
            raise ValueError(f"{distance} must exceed {buckets // 2}, half of position_buckets: each has a bias alone")
        return distance

    @property
    def first_decoder_layer(self) -> int:
        """The number of the first layer of the decoder, which is how many the encoder has."""
        return self.num_layers // 2 if self.encoder_layers is None else self.encoder_layers

    @property
    def features(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_size or 2 * round(4 * self.hidden_size / 3)

    @property
    def initial_std(self) -> float:
        """Standard deviation of initial matrices but the embedding."""
        return self.hidden_size**-0.5 if self.init_std is None else self.init_std

    def explicit(self) -> dict[str, Any]:
        """The options by dotted name, with the values that unset ones mean."""
        found = {"encoder_layers": self.first_decoder_layer, "ffn_size": self.features, "init_std": self.initial_std}
        return flat(self.model_dump()) | found

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        """The encoder's layers read a text of their own, and the decoder's attend to it besides."""
        spec = self.spec(sequence_length, vocab_size)
        plain, reads, length = spec.costs(tied=self.tie_embeddings), self.first_decoder_layer, self.encoder_length
        attention, feed = plain.layers[0].parts
        across = AttentionCosts.over(length, spec.heads, spec.head_size)
        encoder = replace(plain.layers[0], tokens=length)
        decoder = replace(plain.layers[0], parts=(attention, across, feed))
        return replace(
            plain,
            layers=(encoder,) * reads + (decoder,) * (spec.layers - reads),
            positions=0,
            other_weights=2.0 * self.position_buckets * spec.heads,
            vectors=plain.vectors + (spec.layers - reads + 1) * spec.norm_values,  # before looking, after the encoder
            embedded=sequence_length + length,
            approximations=("attention without its biases because what they cost is the kernel's",),
        )

    def spec(self, length: int, vocab_size: int) -> TransformerSpec:
        """Return the layers that these options describe, for a decoder that reads ``length`` tokens."""
        return TransformerSpec(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_heads,
            ffn=self.features,
            vocab=vocab_size,
            sequence_length=length,
            head_features=self.head_size,
            norm="rmsnorm",
            norm_eps=self.norm.eps,
            # Of relu the layers' shapes are gelu's: no gate.
            activation="geglu_tanh" if self.activation == "geglu_tanh" else "gelu",
            bias=False,
            logits_scale=self.hidden_size**-0.5 if self.tie_embeddings else 1.0,
            dropout=self.dropout,
            init_std=self.initial_std,
        )
