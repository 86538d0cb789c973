"""The options of model ``gpt``: a decoder's (``decoder_options``), and those of a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from megatron_run.contracts.meaning import NOT_LEARNED, OF_TRAINING
from megatron_run.errors.wording import nearest_divisors, plural
from megatron_run_engine.builtin.model.decoder_options import DecoderOptions
from megatron_run_engine.nn import ExpertSpec, TransformerSpec
from megatron_run_engine.nn.spec import Dispatch, DropPolicy, Scores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_run.contracts.schema import Config


#: Advice against a mixture of one expert.
_ONE_EXPERT = "set model.experts to 2 or more, or to 0 for the one network that every layer has without experts"


class GptOptions(DecoderOptions):
    """Options of model ``gpt``."""

    experts: int = Field(0, ge=0, le=65536, description="experts per mixture layer; 0: no mixture")
    top_k: int = Field(2, ge=1, validate_default=True, description="experts per token")
    expert_ffn_size: int | None = Field(None, ge=1, description="width of an expert; unset: ffn_size")
    expert_layer_freq: int = Field(1, ge=1, description="layers 0, n, 2n, ... have experts")
    expert_layer_first: int = Field(0, ge=0, description="the layers before this one are dense")
    expert_layer_pattern: tuple[Literal[0, 1], ...] = Field(
        (), description="1: experts, 0: dense; repeated; replaces expert_layer_freq"
    )
    router_score_function: Scores = Field("softmax", description="from router logits to scores")
    router_pre_softmax: bool = Field(
        False, validate_default=True, description="softmax before choosing; false: over the chosen experts"
    )
    router_norm_weights: bool = Field(True, description="sigmoid: divide the weights of chosen experts by their sum")
    router_topk_scaling_factor: float = Field(1.0, gt=0, description="factor on the weights of chosen experts")
    router_groups: int = Field(1, ge=1, validate_default=True, description="groups of neighbouring experts; 1: none")
    router_top_groups: int = Field(
        1, ge=1, validate_default=True, description="groups among whose experts a token chooses"
    )
    router_group_best: int = Field(
        2, ge=1, validate_default=True, description="best scores of a group, summed to compare groups"
    )
    router_bias_rate: float = Field(
        0.0, ge=0, description="step of biases that balance experts without a loss; 0: none"
    )
    aux_loss_coeff: Annotated[float, OF_TRAINING] = Field(0.01, ge=0, description="of the load-balancing loss")
    z_loss_coeff: Annotated[float, OF_TRAINING] = Field(0.0, ge=0, description="of the router z-loss")
    expert_capacity_factor: float | None = Field(
        None, gt=0, description="tokens per expert over an even share; unset: unlimited"
    )
    token_drop_policy: DropPolicy = Field(
        "probs", description="tokens that a full expert drops: least weight, or last position"
    )
    shared_expert_ffn_size: int | None = Field(
        None, ge=1, description="width of the shared expert, which every token passes through; unset: none"
    )
    shared_expert_gate: bool = Field(False, description="gate the shared expert")
    token_dispatcher: Annotated[Dispatch, NOT_LEARNED] = Field(
        "alltoall", description="how tokens reach experts on other ranks"
    )
    expert_pad_to_capacity: Annotated[bool, NOT_LEARNED] = Field(
        False, description="pad every expert's tokens to its capacity"
    )

    @field_validator("experts")
    @classmethod
    def _fits_the_residual(cls, experts: int, info: ValidationInfo) -> int:
        if experts and info.data.get("parallel_residual"):
            raise ValueError("parallel_residual=true is for layers without experts; set experts=0")
        if experts and info.data.get("norm_placement") == "post":
            raise ValueError("norm_placement=post is for layers without experts, whose norm comes first; set it to pre")
        return experts

    @field_validator("top_k")
    @classmethod
    def _chooses_among_experts(cls, top_k: int, info: ValidationInfo) -> int:
        experts = info.data.get("experts")
        if experts == 1 and top_k > 1:
            raise ValueError(f"a token cannot be routed to {top_k} of 1 expert; {_ONE_EXPERT}")
        if experts and top_k > experts:
            raise ValueError(f"a token cannot be routed to {top_k} of {experts} experts; set it to at most {experts}")
        return top_k

    @field_validator("expert_layer_pattern")
    @classmethod
    def _has_experts_somewhere(cls, pattern: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        layers, freq = info.data.get("num_layers"), info.data.get("expert_layer_freq", 1)
        if pattern and freq > 1:
            raise ValueError(f"expert_layer_freq={freq} says which layers have experts too; set one of the two")
        first = info.data.get("expert_layer_first", 0)
        if pattern and layers and not any(pattern[layer % len(pattern)] for layer in range(first, layers)):
            where = f" from layer {first} on" if first else ""
            raise ValueError(f"none of {layers} layers{where} has experts; write a 1, or set experts=0")
        return pattern

    @field_validator("expert_layer_first")
    @classmethod
    def _leaves_a_layer(cls, first: int, info: ValidationInfo) -> int:
        layers, freq = info.data.get("num_layers"), info.data.get("expert_layer_freq", 1)
        if first and layers is not None and -(-first // freq) * freq >= layers:
            raise ValueError(f"none of {layers} layers from layer {first} on has experts; lower it, or set experts=0")
        return first

    @field_validator("router_groups")
    @classmethod
    def _groups_are_equal(cls, groups: int, info: ValidationInfo) -> int:
        experts = info.data.get("experts")
        if experts and experts % groups:
            raise ValueError(
                f"{experts} experts do not divide into {groups} groups; set it to {nearest_divisors(experts, groups)}"
            )
        return groups

    @field_validator("router_top_groups")
    @classmethod
    def _chooses_among_groups(cls, top_groups: int, info: ValidationInfo) -> int:
        experts, groups, top_k = (info.data.get(key) for key in ("experts", "router_groups", "top_k"))
        if groups is not None and top_groups > groups:
            raise ValueError(f"a token cannot choose {top_groups} of {groups} groups; set it to at most {groups}")
        if experts and groups is not None and top_k is not None and top_groups * (experts // groups) < top_k:
            least = -(-top_k // (experts // groups))
            raise ValueError(
                f"{top_groups} of {groups} groups have {top_groups * (experts // groups)} experts, "
                f"and a token needs {top_k}; set it to at least {least}"
            )
        return top_groups

    @field_validator("router_group_best")
    @classmethod
    def _compares_experts_of_a_group(cls, best: int, info: ValidationInfo) -> int:
        experts, groups = info.data.get("experts"), info.data.get("router_groups", 1)
        if experts and groups > 1 and best > experts // groups:
            raise ValueError(f"a group has {experts // groups} experts; set it to at most that")
        return best

    @field_validator("router_pre_softmax")
    @classmethod
    def _one_expert_learns(cls, pre_softmax: bool, info: ValidationInfo) -> bool:
        # A softmax over one chosen logit is always 1: its gradient is zero.
        experts = info.data.get("experts")
        one = experts and info.data.get("top_k") == 1
        if one and not pre_softmax and info.data.get("router_score_function") == "softmax":
            why = "with model.top_k=1 the one chosen expert always weighs 1, and a router learns nothing"
            raise ValueError(f"{why}; {_ONE_EXPERT if experts == 1 else 'set model.router_pre_softmax to true'}")
        return pre_softmax

    @field_validator("expert_pad_to_capacity")
    @classmethod
    def _pads_to_something(cls, pad: bool, info: ValidationInfo) -> bool:
        if pad and info.data.get("expert_capacity_factor") is None:
            raise ValueError("there is nothing to pad to; set model.expert_capacity_factor, such as to 1.25")
        if pad and info.data.get("token_dispatcher") == "allgather":
            raise ValueError("allgather sends tokens, and what is padded are experts' rows; leave token_dispatcher out")
        return pad

    @property
    def expert_keys(self) -> tuple[str, ...]:
        """The keys that are set to other values than their defaults and have no effect without experts."""
        fields = {name: field for name, field in GptOptions.model_fields.items() if name not in _DENSE_KEYS}
        return tuple(name for name, field in fields.items() if getattr(self, name) != field.default)

    @property
    def expert_layers(self) -> frozenset[int]:
        """The indices of the layers that have experts."""
        pattern, freq, first = self.expert_layer_pattern, self.expert_layer_freq, self.expert_layer_first
        if not pattern:
            return frozenset(range(-(-first // freq) * freq, self.num_layers, freq))
        return frozenset(layer for layer in range(first, self.num_layers) if pattern[layer % len(pattern)])

    def explicit(self) -> dict[str, Any]:
        """As :meth:`DecoderOptions.explicit`; ``expert_layer_pattern`` has a number for each layer."""
        found = super().explicit()
        if not self.experts:
            return found | {name: GptOptions.model_fields[name].default for name in self.expert_keys}
        size = self.expert_ffn_size or found["ffn_size"]
        if len(self.expert_layers) == self.num_layers:
            found["ffn_size"] = size  # no layer has its own
        if self.router_groups == 1:
            found |= {key: GptOptions.model_fields[key].default for key in ("router_top_groups", "router_group_best")}
        return found | {
            "expert_layer_freq": 1,
            "expert_layer_first": 0,
            "expert_layer_pattern": tuple(int(layer in self.expert_layers) for layer in range(self.num_layers)),
            "expert_ffn_size": size,
        }

    def spec(self, sequence_length: int) -> TransformerSpec:
        """Return the network that these options describe. Raises ValueError while ``vocab_size`` is unset."""
        return self.dense_spec(sequence_length, self.expert_spec() if self.experts else None)

    def expert_spec(self) -> ExpertSpec:
        """Return the specification of a layer with experts. ``experts`` must be above 0."""
        return ExpertSpec(
            count=self.experts,
            top_k=self.top_k,
            ffn=self.expert_ffn_size or self.ffn_size or 4 * self.hidden_size,
            layers=self.expert_layers,
            scores=self.router_score_function,
            pre_softmax=self.router_pre_softmax,
            normalised=self.router_norm_weights,
            scaling=self.router_topk_scaling_factor,
            groups=self.router_groups,
            top_groups=self.router_top_groups,
            group_best=self.router_group_best,
            bias_rate=self.router_bias_rate,
            balance=self.aux_loss_coeff,
            z=self.z_loss_coeff,
            capacity_factor=self.expert_capacity_factor,
            drop=self.token_drop_policy,
            pad=self.expert_pad_to_capacity,
            shared_ffn=self.shared_expert_ffn_size or 0,
            shared_gate=self.shared_expert_gate,
            dispatch=self.token_dispatcher,
        )


_DENSE_KEYS = frozenset({*DecoderOptions.model_fields, "experts"})


#: A capacity factor below this drops most choices.
_LOW_CAPACITY = 0.5


def expert_notices(config: Config, options: GptOptions) -> Iterator[str]:
    """Yield notices about options without effect, and about a capacity that drops most choices."""
    if not options.experts:
        if idle := options.expert_keys:
            yield f"{', '.join(f'model.{key}' for key in idle)}: without model.experts nothing reads it"
        return
    if config.parallel.expert == 1 and options.token_dispatcher != "alltoall":
        yield "model.token_dispatcher changes nothing: with parallel.expert=1 every rank holds all experts"
    if options.shared_expert_gate and not options.shared_expert_ffn_size:
        yield "model.shared_expert_gate changes nothing: without model.shared_expert_ffn_size there is no shared expert"
    if options.router_pre_softmax and options.router_score_function != "softmax":
        score = options.router_score_function
        yield f"model.router_pre_softmax changes nothing: model.router_score_function={score} has no softmax"
    if not options.router_norm_weights and options.router_score_function != "sigmoid":
        yield (
            "model.router_norm_weights changes nothing: with model.router_score_function=softmax, "
            "model.router_pre_softmax says whether weights are normalised over all experts or over the chosen ones"
        )
    if options.router_groups == 1 and options.router_top_groups > 1:
        yield "model.router_top_groups changes nothing: model.router_groups=1 makes no groups"
    yield from _about_layers(options)
    yield from _about_capacity(config, options)


def _about_layers(options: GptOptions) -> Iterator[str]:
    layers, pattern, freq = options.num_layers, options.expert_layer_pattern, options.expert_layer_freq
    if len(pattern) > layers:
        yield (
            f"model.expert_layer_pattern has {plural(len(pattern), 'value')} for {plural(layers, 'layer')}: "
            f"those after the first {layers} do nothing"
        )
    if freq > layers:
        yield f"model.expert_layer_freq={freq} is above model.num_layers={layers}: layer 0 alone has experts"


def _about_capacity(config: Config, options: GptOptions) -> Iterator[str]:
    factor, experts = options.expert_capacity_factor, options.experts
    if factor is None:
        if options.token_drop_policy != "probs":
            yield (
                f"model.token_drop_policy={options.token_drop_policy} changes nothing: without "
                "model.expert_capacity_factor no token is dropped"
            )
        return
    if factor < _LOW_CAPACITY:
        tokens = config.train.micro_batch_size * config.train.sequence_length
        capacity, choices = options.expert_spec().capacity(tokens), tokens * options.top_k
        kept = experts * capacity
        yield (
            f"model.expert_capacity_factor={factor:g} drops most choices: {experts} experts x {capacity} tokens keep "
            f"at most {kept:,} of the {choices:,} choices of a microbatch, {kept / choices:.0%}"
        )
