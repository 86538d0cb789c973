"""Group ``model.experts``: a mixture of experts, its router, and an expert that every token passes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from megatron_run.config.values import flat
from megatron_run.contracts.meaning import NOT_LEARNED, OF_TRAINING
from megatron_run.contracts.option_groups import Group, fault_at
from megatron_run.errors.wording import nearest_divisors
from megatron_run_engine.builtin.model.rope_options import Pattern
from megatron_run_engine.nn import ExpertSpec
from megatron_run_engine.nn.spec import Dispatch, DropPolicy, Scores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import PydanticCustomError

#: Advice against a mixture of one expert.
_ONE_EXPERT = "set model.experts.count to 2 or more, or to 0 for the one network that every layer has without experts"


class RouterOptions(Group):
    """How a token chooses its experts."""

    score_function: Scores = Field("softmax", description="from router logits to scores")
    pre_softmax: bool = Field(False, description="softmax before choosing; false: over the chosen experts")
    norm_weights: bool = Field(True, description="sigmoid: divide the weights of chosen experts by their sum")
    scaling_factor: float = Field(1.0, gt=0, description="factor on the weights of chosen experts")
    groups: int = Field(1, ge=1, description="groups of neighbouring experts; 1: none")
    top_groups: int = Field(1, ge=1, description="groups among whose experts a token chooses")
    group_best: int = Field(2, ge=1, description="best scores of a group, summed to compare groups")
    bias_rate: float = Field(0.0, ge=0, description="step of biases that balance experts without a loss; 0: none")

    @model_validator(mode="after")
    def _chooses_among_groups(self) -> Self:
        if self.top_groups > self.groups:
            why = f"a token cannot choose {self.top_groups} of {self.groups} groups; set it to at most {self.groups}"
            raise fault_at(self, "top_groups", why)
        return self


class SharedOptions(Group):
    """The expert that every token passes through."""

    ffn_size: int | None = Field(None, ge=1, description="width of the shared expert; unset: there is none")
    gate: bool = Field(False, description="gate the shared expert")


class ExpertOptions(Group):
    """The experts of a layer, and which layers have them."""

    count: int = Field(0, ge=0, le=65536, description="experts per mixture layer; 0: no mixture")
    top_k: int = Field(2, ge=1, description="experts per token")
    ffn_size: int | None = Field(None, ge=1, description="width of an expert; unset: model.ffn_size")
    layer_freq: int = Field(1, ge=1, description="layers 0, n, 2n, ... have experts")
    layer_first: int = Field(0, ge=0, description="the layers before this one are dense")
    layer_pattern: Pattern = Field((), description="1: experts, 0: dense; repeated; replaces layer_freq")
    router: RouterOptions = Field(RouterOptions(), description="how a token chooses its experts")
    shared: SharedOptions = Field(SharedOptions(), description="the expert that every token passes through")
    aux_loss_coeff: Annotated[float, OF_TRAINING] = Field(0.01, ge=0, description="of the load-balancing loss")
    z_loss_coeff: Annotated[float, OF_TRAINING] = Field(0.0, ge=0, description="of the router z-loss")
    capacity_factor: float | None = Field(
        None, gt=0, description="tokens per expert over an even share; unset: unlimited"
    )
    drop_policy: DropPolicy = Field(
        "probs", description="tokens that a full expert drops: least weight, or last position"
    )
    dispatcher: Annotated[Dispatch, NOT_LEARNED] = Field(
        "alltoall", description="how tokens reach experts on other ranks"
    )
    pad_to_capacity: Annotated[bool, NOT_LEARNED] = Field(
        False, description="pad every expert's tokens to its capacity"
    )

    @model_validator(mode="after")
    def _is_a_mixture(self) -> Self:
        for fault in (*self._faults_of_choice(), *self._faults_of_groups(), *self._faults_of_layout()):
            raise fault
        return self

    def _faults_of_choice(self) -> Iterator[PydanticCustomError]:
        count, top_k, router = self.count, self.top_k, self.router
        if count == 1 < top_k:
            yield fault_at(self, "top_k", f"a token cannot be routed to {top_k} of 1 expert; {_ONE_EXPERT}")
        if count and top_k > count:
            yield fault_at(
                self, "top_k", f"a token cannot be routed to {top_k} of {count} experts; set it to at most {count}"
            )
        # A softmax over one chosen logit is always 1: its gradient is zero.
        if count and top_k == 1 and router.score_function == "softmax" and not router.pre_softmax:
            why = "with model.experts.top_k=1 the one chosen expert always weighs 1, and a router learns nothing"
            fix = _ONE_EXPERT if count == 1 else "set model.experts.router.pre_softmax to true"
            yield fault_at(self, "router.pre_softmax", f"{why}; {fix}")

    def _faults_of_groups(self) -> Iterator[PydanticCustomError]:
        count, groups, chosen = self.count, self.router.groups, self.router.top_groups
        if count % groups:
            divisors = nearest_divisors(count, groups)
            why = f"{count} experts do not divide into {groups} groups; set it to {divisors}"
            yield fault_at(self, "router.groups", why)
            return
        within = count // groups
        if count and chosen * within < self.top_k:
            why = f"{chosen} of {groups} groups have {chosen * within} experts, and a token needs {self.top_k}"
            yield fault_at(self, "router.top_groups", f"{why}; set it to at least {-(-self.top_k // within)}")
        if count and groups > 1 and self.router.group_best > within:
            yield fault_at(self, "router.group_best", f"a group has {within} experts; set it to at most that")

    def _faults_of_layout(self) -> Iterator[PydanticCustomError]:
        if self.layer_pattern and self.layer_freq > 1:
            why = f"experts.layer_freq={self.layer_freq} says which layers have experts too; set one of the two"
            yield fault_at(self, "layer_pattern", why)
        if self.pad_to_capacity and self.capacity_factor is None:
            why = "there is nothing to pad to; set model.experts.capacity_factor, such as to 1.25"
            yield fault_at(self, "pad_to_capacity", why)
        if self.pad_to_capacity and self.dispatcher == "allgather":
            why = "allgather sends tokens, and what is padded are experts' rows; leave experts.dispatcher out"
            yield fault_at(self, "pad_to_capacity", why)

    def wrong_layers(self, layers: int) -> tuple[str, str] | None:
        """The key by which none of ``layers`` has experts, and why; None if one has."""
        first, freq, pattern, none = self.layer_first, self.layer_freq, self.layer_pattern, f"none of {layers} layers"
        if first and -(-first // freq) * freq >= layers:
            return "layer_first", f"{none} from layer {first} on has experts; lower it, or set experts.count=0"
        if pattern and not any(
            pattern[layer % len(pattern)] for layer in range(first, min(layers, first + len(pattern)))
        ):
            where = f" from layer {first} on" if first else ""
            return "layer_pattern", f"{none}{where} has experts; write a 1, or set experts.count=0"
        return None

    @property
    def idle(self) -> tuple[str, ...]:
        """The keys that are set to other values than their defaults, and have no effect while ``count`` is 0."""
        usual = flat(type(self)().model_dump())
        return tuple(key for key, value in flat(self.model_dump()).items() if key != "count" and value != usual[key])

    def layers(self, layers: int) -> frozenset[int]:
        """The indices of those of ``layers`` that have experts."""
        pattern, freq, first = self.layer_pattern, self.layer_freq, self.layer_first
        if not pattern:
            return frozenset(range(-(-first // freq) * freq, layers, freq))
        return frozenset(layer for layer in range(first, layers) if pattern[layer % len(pattern)])

    def explicit(self, layers: int, ffn: int) -> dict[str, Any]:
        """The options by dotted name with the values that unset ones mean, and a number for each of ``layers``."""
        if not self.count:
            return flat(type(self)().model_dump())
        found, usual, having = flat(self.model_dump()), type(self.router)(), self.layers(layers)
        if self.router.groups == 1:
            found |= {"router.top_groups": usual.top_groups, "router.group_best": usual.group_best}
        return found | {
            "layer_freq": 1,
            "layer_first": 0,
            "layer_pattern": tuple(int(layer in having) for layer in range(layers)),
            "ffn_size": self.ffn_size or ffn,
        }

    def spec(self, layers: int, ffn: int) -> ExpertSpec:
        """Return the specification of a layer with experts, where one without has ``ffn``. ``count`` is above 0."""
        router = self.router
        return ExpertSpec(
            count=self.count,
            top_k=self.top_k,
            ffn=self.ffn_size or ffn,
            layers=self.layers(layers),
            scores=router.score_function,
            pre_softmax=router.pre_softmax,
            normalised=router.norm_weights,
            scaling=router.scaling_factor,
            groups=router.groups,
            top_groups=router.top_groups,
            group_best=router.group_best,
            bias_rate=router.bias_rate,
            balance=self.aux_loss_coeff,
            z=self.z_loss_coeff,
            capacity_factor=self.capacity_factor,
            drop=self.drop_policy,
            pad=self.pad_to_capacity,
            shared_ffn=self.shared.ffn_size or 0,
            shared_gate=self.shared.gate,
            dispatch=self.dispatcher,
        )
