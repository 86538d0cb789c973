"""Dynamic loss scaling written down once more, in plain Python numbers: what the plugin is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

State = tuple[float, int, int]


@dataclass
class LossScale:
    """Exact where scale and factors are powers of two, which no multiplication rounds."""

    initial_loss_scale: float
    min_loss_scale: float
    loss_scale_window: int
    hysteresis: int
    growth_factor: float
    backoff_factor: float
    scale: float = field(init=False)
    growth_tracker: int = field(init=False, default=0)
    hysteresis_tracker: int = field(init=False)

    def __post_init__(self) -> None:
        self.scale, self.hysteresis_tracker = self.initial_loss_scale, self.hysteresis

    @property
    def state(self) -> State:
        """Scale, growth tracker, hysteresis tracker."""
        return self.scale, self.growth_tracker, self.hysteresis_tracker

    def walk(self, overflows: Iterable[bool]) -> Iterator[State]:
        """The state after each step."""
        for overflow in overflows:
            if overflow:
                self._overflow()
            else:
                self._clean()
            yield self.state

    def _overflow(self) -> None:
        self.growth_tracker = 0
        self.hysteresis_tracker -= 1
        if self.hysteresis_tracker <= 0:
            self.scale = max(self.scale * self.backoff_factor, self.min_loss_scale)

    def _clean(self) -> None:
        self.growth_tracker += 1
        if self.growth_tracker == self.loss_scale_window:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.scale *= self.growth_factor


def drawn_options(random: Random) -> dict[str, Any]:
    """Options of powers of two with windows so short that scales move, and so long that 100 steps stay in fp32."""
    window = random.randint(3, 12)
    exponent = random.randint(-4, 32)
    return {
        "initial_loss_scale": 2.0**exponent,
        "min_loss_scale": 2.0 ** (exponent - random.randint(0, 12)),
        "loss_scale_window": window,
        "hysteresis": random.randint(1, 4),
        "growth_factor": random.choice([2.0, 4.0] if window > 5 else [2.0]),
        "backoff_factor": random.choice([0.5, 0.25]),
    }


def drawn_overflows(random: Random, steps: int) -> list[bool]:
    """Whether each step overflows: in some sequences none does, in others nearly all do."""
    share = random.choice([0.0, 0.02, 0.1, 0.3, 0.6, 0.95])
    return [random.random() < share for _ in range(steps)]
