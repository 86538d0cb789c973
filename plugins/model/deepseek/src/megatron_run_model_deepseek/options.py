"""The options of model ``deepseek``: those of ``gpt`` with other defaults, and the sizes of latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.nn import TransformerSpec
from megatron_run_model_deepseek.latent_attention import LatentShape


class DeepSeekOptions(GptOptions):
    """A decoder with latent attention; the defaults of the network are DeepSeek-V3's, sizes are free."""

    kv_rank: int = Field(ge=1, description="features of the latent from which keys and values are made")
    query_rank: int | None = Field(None, ge=1, description="features of the latent of queries; unset: there is none")
    rope_head_size: int = Field(ge=2, multiple_of=2, description="features of a head that rotate, one key for all")
    nope_head_size: int = Field(ge=1, description="features of a head that do not rotate")
    value_head_size: int = Field(ge=1, description="value features of a head")
    mtp_layers: int = Field(0, ge=0, le=16, description="further tokens that are predicted; 0: the next one alone")
    mtp_loss_coeff: float = Field(0.3, gt=0, description="of the mean loss of further tokens")
    position: Literal["rope"] = Field("rope", description="rotary, of rope_head_size features")
    norm: Literal["rmsnorm"] = Field("rmsnorm", description="of the residual stream and the latents")
    activation: Literal["swiglu"] = Field("swiglu", description="of the feed-forward layer")
    norm_eps: float = Field(1e-6, gt=0, description="added to the variance")
    bias: Literal[False] = Field(False, description="there are no biases")
    tie_embeddings: bool = Field(False, description="output layer and embedding share weights")
    dropout: float = Field(0.0, ge=0, lt=1, description="on embedding, attention and residual connections")

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
        fixed |= {key: GptOptions.model_fields[key].default for key in _FIXED}
        for key, value in fixed.items():
            if getattr(self, key) not in (value, None):
                raise ValueError(f"{key}={getattr(self, key)}: with latent attention it is {value}; leave it out")
        if self.value_head_size > size:
            raise ValueError(
                f"value_head_size={self.value_head_size} is above rope_head_size + nope_head_size = {size}: "
                "values are padded to the size of keys; set it to at most that"
            )
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

    def spec(self, sequence_length: int) -> TransformerSpec:
        """Return the network that these options describe. Raises ValueError while ``vocab_size`` is unset."""
        size = self.rope_head_size + self.nope_head_size
        share = (self.rope_head_size + 0.5) / size  # rounded down to the features that rotate
        return replace(super().spec(sequence_length), head_features=size, rope_fraction=share)


#: Options of ``gpt`` that latent attention fixes at their defaults.
_FIXED = (
    "rope_fraction",
    "rope_pattern",
    "attention_window",
    "window_pattern",
    "window_rope_theta",
    "attention_softcap",
    "norm_placement",
    "qk_norm",
    "qkv_bias",
)
