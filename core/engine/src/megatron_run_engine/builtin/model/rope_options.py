"""Group ``model.rope``: rotary positions, and how they stretch to longer sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatron_run.contracts.meaning import FREE_OF_WEIGHTS
from megatron_run.contracts.option_groups import Group, fault_at
from megatron_run_engine.nn.spec import RopeScaling, RopeScalingKind

#: One number for each layer, repeated to the last one.
Pattern = tuple[Literal[0, 1], ...]
Positive = Annotated[float, Field(gt=0)]
#: Above so many turns over the original length a pair of features keeps its frequency, by kind of scaling.
_FAST = {"linear": 1.0, "llama3": 4.0, "yarn": 32.0, "longrope": 1.0}


def spread(pattern: Pattern, layers: int) -> Pattern:
    """``pattern`` repeated to the last of ``layers``, ones for none."""
    return tuple((pattern or (1,))[layer % len(pattern or (1,))] for layer in range(layers))


def chosen_layers(pattern: Pattern, layers: int) -> frozenset[int]:
    """The indices of the layers that ``pattern`` chooses."""
    return frozenset(layer for layer, chosen in enumerate(spread(pattern, layers)) if chosen)


class RopeOptions(Group):
    """Rotary positions, of ``position=rope``."""

    theta: Annotated[float, FREE_OF_WEIGHTS] = Field(10000.0, gt=0, description="base of the rotation angles")
    fraction: float = Field(1.0, gt=0, le=1, description="share of a head's features that rotate, the first ones")
    pattern: Pattern = Field(
        (), description="1: the layer rotates, 0: it has no positions; repeated; unset: all rotate"
    )
    window_theta: float | None = Field(
        None, gt=0, description="base of the angles in layers with a window, unscaled; unset: as in the others"
    )
    scaling: Annotated[RopeScalingKind | None, FREE_OF_WEIGHTS] = Field(
        None, description="how rotations stretch to sequences longer than the first training's; unset: not"
    )
    factor: Annotated[float, FREE_OF_WEIGHTS] = Field(
        1.0, ge=1, description="how many times longer; of model.rope.scaling"
    )
    original_length: Annotated[int | None, FREE_OF_WEIGHTS] = Field(
        None, ge=2, description="length of the first training; all but linear need it"
    )
    low_freq: Annotated[float, FREE_OF_WEIGHTS] = Field(
        1.0, gt=0, description="turns in that length below which rotations slow by the factor"
    )
    high_freq: Annotated[float | None, FREE_OF_WEIGHTS] = Field(
        None, gt=0, description="turns in that length above which rotations stay; unset: 4 for llama3, 32 for yarn"
    )
    attention_factor: Annotated[float | None, FREE_OF_WEIGHTS] = Field(
        None,
        gt=0,
        description="on rotated queries and keys; unset: 0.1 ln(factor) + 1 for yarn, "
        "sqrt(1 + ln(factor) / ln(original length)) for longrope, else 1",
    )
    short_factors: Annotated[tuple[Positive, ...], FREE_OF_WEIGHTS] = Field(
        (), description="longrope: times slower each pair turns in texts of at most original_length tokens"
    )
    long_factors: Annotated[tuple[Positive, ...], FREE_OF_WEIGHTS] = Field(
        (), description="longrope: the same in longer ones"
    )

    @model_validator(mode="after")
    def _scaling_is_whole(self) -> Self:
        if self.original_length is None and self.scaling not in (None, "linear"):
            why = f"rope.scaling={self.scaling} needs the length of the first training, such as 8192"
            raise fault_at(self, "original_length", why)
        if self.high_freq is not None and self.high_freq <= self.low_freq:
            raise fault_at(self, "high_freq", f"{self.high_freq:g} turns are not above rope.low_freq={self.low_freq:g}")
        return self

    def wrong_lists(self, pairs: int) -> str:
        """Which lists of longrope have not a factor for each of ``pairs`` of features; empty if both have."""
        lists = ("short_factors", "long_factors") if self.scaling == "longrope" else ()
        counts = {name: len(getattr(self, name)) for name in lists}
        return ", ".join(f"rope.{name} has {count} numbers" for name, count in counts.items() if count != pairs)

    def explicit(self, layers: int, *, used: bool, windows: bool) -> dict[str, Any]:
        """The options with the values that unset ones mean; what is not ``used`` has its default.

        ``windows`` says whether there are layers with a window.
        """
        found, scaling = self.model_dump() | {"pattern": spread(self.pattern, layers)}, self.stretched()
        unused = set[str]() if windows else {"window_theta"}
        if scaling is None:
            unused |= _OF_SCALING
            found["window_theta"] = self.window_theta or self.theta
        else:
            unused |= _OF_SCALING - _NUMBERS[scaling.kind]
            found |= {"high_freq": scaling.high, "attention_factor": scaling.attention_factor}
        return found | {key: type(self).model_fields[key].default for key in (unused if used else found)}

    def stretched(self) -> RopeScaling | None:
        """The scaling; None without one."""
        kind = self.scaling
        if kind is None:
            return None
        longer, original = math.log(self.factor), self.original_length or 1
        usual = 0.1 * longer + 1 if kind == "yarn" else 1.0
        if kind == "longrope" and longer:
            usual = math.sqrt(1 + longer / math.log(original))
        return RopeScaling(
            kind,
            factor=self.factor,
            original=original,
            low=self.low_freq,
            high=self.high_freq or _FAST[kind],
            attention_factor=self.attention_factor or usual,
            short=self.short_factors,
            long=self.long_factors,
        )


_RAMP = {"factor", "original_length", "low_freq", "high_freq", "attention_factor"}
#: The options of each kind of scaling.
_NUMBERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "linear": frozenset({"factor", "attention_factor"}),
        "llama3": frozenset(_RAMP),
        "yarn": frozenset(_RAMP),
        "longrope": frozenset({*_RAMP, "short_factors", "long_factors"} - {"low_freq", "high_freq"}),
    }
)
_OF_SCALING = frozenset[str]().union(*_NUMBERS.values())
