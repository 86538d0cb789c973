"""The options of model ``gpt``: a decoder's, and those of a mixture of experts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from megatron_run_engine.builtin.model.decoder_options import DecoderOptions
from megatron_run_engine.nn import ExpertSpec, TransformerSpec
from megatron_run_engine.nn.moe.spec import Dispatch, DropPolicy, Scores

#: What to do in place of a mixture of one.
_ONE_EXPERT = "set model.experts to 2 or more, or to 0 for the one network that every layer has without experts"


class GptOptions(DecoderOptions):
    """Options of model ``gpt``."""

    experts: int = Field(0, ge=0, description="experts per mixture layer; 0: no mixture")
    top_k: int = Field(2, ge=1, validate_default=True, description="experts per token")
    expert_ffn_size: int | None = Field(None, ge=1, description="width of an expert; unset: ffn_size")
    expert_layer_freq: int = Field(1, ge=1, description="layers 0, n, 2n, ... have experts")
    expert_layer_pattern: tuple[Literal[0, 1], ...] = Field(
        (), description="1: experts, 0: dense; repeated to the last layer; replaces expert_layer_freq"
    )
    router_score_function: Scores = Field("softmax", description="from router logits to scores")
    router_pre_softmax: bool = Field(
        False, validate_default=True, description="softmax before choosing; false: over the chosen experts"
    )
    router_topk_scaling_factor: float = Field(1.0, gt=0, description="factor on the weights of chosen experts")
    aux_loss_coeff: float = Field(0.01, ge=0, description="of the load-balancing loss")
    z_loss_coeff: float = Field(0.0, ge=0, description="of the router z-loss, such as 1e-3")
    expert_capacity_factor: float | None = Field(
        None, gt=0, description="tokens per expert over an even share; unset: unlimited"
    )
    token_drop_policy: DropPolicy = Field(
        "probs", description="tokens that a full expert drops: least weight, or last position"
    )
    shared_expert_ffn_size: int | None = Field(
        None, ge=1, description="width of the shared expert that every token meets; unset: none"
    )
    shared_expert_gate: bool = Field(False, description="gate the shared expert")
    token_dispatcher: Dispatch = Field("alltoall", description="how tokens reach experts on other ranks")

    @field_validator("top_k")
    @classmethod
    def _chooses_among_experts(cls, top_k: int, info: ValidationInfo) -> int:
        experts = info.data.get("experts")
        if experts == 1 and top_k > 1:
            raise ValueError(f"a token cannot meet {top_k} of 1 expert; {_ONE_EXPERT}")
        if experts and top_k > experts:
            raise ValueError(f"a token cannot meet {top_k} of {experts} experts; set it to at most {experts}")
        return top_k

    @field_validator("expert_layer_pattern")
    @classmethod
    def _has_experts_somewhere(cls, pattern: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        layers, freq = info.data.get("num_layers"), info.data.get("expert_layer_freq", 1)
        if pattern and freq > 1:
            raise ValueError(f"expert_layer_freq={freq} says which layers have experts too; set one of the two")
        if pattern and layers is not None and not any(pattern[:layers]):
            raise ValueError(f"none of {layers} layers has experts; write a 1, or set experts=0")
        return pattern

    @field_validator("router_pre_softmax")
    @classmethod
    def _one_expert_learns(cls, pre_softmax: bool, info: ValidationInfo) -> bool:  # pydantic calls it
        experts = info.data.get("experts")
        one = experts and info.data.get("top_k") == 1
        if one and not pre_softmax and info.data.get("router_score_function") == "softmax":
            why = "with model.top_k=1 the one chosen expert always weighs 1, and a router learns nothing"
            raise ValueError(f"{why}; {_ONE_EXPERT if experts == 1 else 'set model.router_pre_softmax to true'}")
        return pre_softmax

    @property
    def expert_keys(self) -> tuple[str, ...]:
        """The keys with other values than their defaults that do nothing without experts."""
        fields = {name: field for name, field in GptOptions.model_fields.items() if name not in _DENSE_KEYS}
        return tuple(name for name, field in fields.items() if getattr(self, name) != field.default)

    @property
    def expert_layers(self) -> frozenset[int]:
        """The layers that have experts."""
        pattern: tuple[int, ...] = self.expert_layer_pattern or (1, *(0,) * (self.expert_layer_freq - 1))
        return frozenset(layer for layer in range(self.num_layers) if pattern[layer % len(pattern)])

    def spec(self, sequence_length: int) -> TransformerSpec:
        """The network these options describe. Raises ValueError while the vocabulary is unknown."""
        return self.dense_spec(sequence_length, self.expert_spec() if self.experts else None)

    def expert_spec(self) -> ExpertSpec:
        """A layer of experts, of which there are some."""
        return ExpertSpec(
            count=self.experts,
            top_k=self.top_k,
            ffn=self.expert_ffn_size or self.ffn_size or 4 * self.hidden_size,
            layers=self.expert_layers,
            scores=self.router_score_function,
            pre_softmax=self.router_pre_softmax,
            scaling=self.router_topk_scaling_factor,
            balance=self.aux_loss_coeff,
            z=self.z_loss_coeff,
            capacity_factor=self.expert_capacity_factor,
            drop=self.token_drop_policy,
            shared_ffn=self.shared_expert_ffn_size or 0,
            shared_gate=self.shared_expert_gate,
            dispatch=self.token_dispatcher,
        )


_DENSE_KEYS = frozenset({*DecoderOptions.model_fields, "experts"})
