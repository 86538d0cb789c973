"""Learning rate and weight decay as functions of the samples consumed; the formulas of Megatron-LM.

Symbols: n samples consumed before the step, W warm-up, D end of the decay, both in samples; r = (n - W) / (D - W).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, pi, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from megatron_run.errors import InputError
from megatron_run.planning.batch_size import total_samples

if TYPE_CHECKING:
    from megatron_run.contracts.schema import TrainSection

Shape = Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"]
AnnealShape = Literal["exponential", "minus_sqrt", "linear", "cosine"]
DecayShape = Literal["constant", "linear", "cosine"]


def _half_cosine(r: float) -> float:
    """From 1 at r = 0 down to 0 at r = 1 along half a cosine."""
    return 0.5 * (1 + cos(pi * r))


#: How the annealing of WSD falls from 1 to 0 as its share s goes from 0 to 1.
_ANNEAL: Mapping[AnnealShape, Callable[[float], float]] = MappingProxyType(
    {
        "exponential": lambda s: 2 * 0.5**s - 1,
        "minus_sqrt": lambda s: 1 - sqrt(s),
        "linear": lambda s: 1 - s,
        "cosine": _half_cosine,
    }
)


@dataclass(frozen=True)
class LearningRate:
    """The learning rate: a warm-up, then a shape between ``maximum`` and ``minimum``.

    ``warmup`` (W), ``decay`` (D) and ``wsd`` are in samples. With ``wsd`` (warm-up, stable, decay) the rate stays at
    its maximum until ``D - wsd`` and is then annealed. After D it is ``minimum``, unless the shape is constant.
    """

    maximum: float
    minimum: float
    shape: Shape
    warmup: int
    decay: int
    wsd: int = 0
    wsd_shape: AnnealShape = "exponential"

    @classmethod
    def from_config(cls, train: TrainSection, total: int | None = None) -> LearningRate:
        """The rate of a ``train`` section, whose spans become samples of a run of ``total``, by default its own.

        Raises :class:`InputError` when the warm-up does not end before the decay.
        """
        total, batch = total_samples(train) if total is None else total, train.global_batch_size
        return cls(
            maximum=train.lr,
            minimum=train.min_lr,
            shape=train.lr_shape,
            warmup=train.lr_warmup.samples(total, batch),
            decay=train.lr_decay.samples(total, batch),
            wsd=train.lr_wsd.samples(total, batch),
            wsd_shape=train.lr_wsd_shape,
        )

    def __post_init__(self) -> None:
        if self.shape != "constant" and self.warmup >= self.decay:
            raise InputError(
                "the learning rate's warm-up does not end before its decay",
                why=f"train.lr_warmup is {self.warmup} samples, train.lr_decay {self.decay}",
                fix="lower train.lr_warmup, or set train.lr_shape to constant",
            )

    def at(self, samples: int) -> float:
        """The rate of the step that starts once ``samples`` samples have been consumed."""
        if self.warmup and samples <= self.warmup:
            return self.maximum * samples / self.warmup
        if self.shape == "constant":
            return self.maximum
        if samples > self.decay:
            return self.minimum
        if self.shape == "inverse_sqrt":
            return max(self.minimum, self.maximum * sqrt(max(self.warmup, 1)) / sqrt(max(samples, 1)))
        return self.minimum + self._coefficient(samples) * (self.maximum - self.minimum)

    def _coefficient(self, samples: int) -> float:
        """Where between minimum (0) and maximum (1) the rate lies, for W < n <= D."""
        if self.shape == "wsd":
            start = self.decay - self.wsd
            return 1.0 if samples <= start else _ANNEAL[self.wsd_shape]((samples - start) / self.wsd)
        ratio = (samples - self.warmup) / (self.decay - self.warmup)
        return 1 - ratio if self.shape == "linear" else _half_cosine(ratio)


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay that moves from ``start`` to ``end`` over the run's ``samples``, and stays there."""

    start: float
    end: float
    shape: DecayShape
    samples: int

    @classmethod
    def from_config(cls, train: TrainSection, total: int | None = None) -> WeightDecay:
        """The weight decay of a ``train`` section over ``total`` samples; without an end it is constant.

        Raises :class:`InputError` when an end is given but no shape that leads there.
        """
        end = train.weight_decay if train.weight_decay_end is None else train.weight_decay_end
        return cls(train.weight_decay, end, train.weight_decay_shape, total_samples(train) if total is None else total)

    def __post_init__(self) -> None:
        if self.shape == "constant" and self.start != self.end:
            raise InputError(
                f"train.weight_decay_end={self.end:g} differs from train.weight_decay={self.start:g}",
                why="a constant weight decay never reaches it",
                fix="set train.weight_decay_shape to linear or cosine",
            )

    def at(self, samples: int) -> float:
        """The weight decay of the step that starts once ``samples`` samples have been consumed."""
        if self.shape == "constant" or samples > self.samples:
            return self.end
        ratio = samples / self.samples
        return self.start + (ratio if self.shape == "linear" else _half_cosine(1 - ratio)) * (self.end - self.start)
