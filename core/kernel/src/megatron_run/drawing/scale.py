"""An axis: which values it spans, linear or logarithmic, where its ticks are, and what they say."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

#: A range of positive values this wide is drawn by its logarithm.
WIDE = 30.0


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` over pixels from ``begin`` to ``end``, which may be the smaller one."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of ``value``; of what lies outside the nearest end's."""
        low, high, value = (self._measure(each) for each in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return self.begin + min(max(share, 0.0), 1.0) * (self.end - self.begin)

    def _measure(self, value: float) -> float:
        return log10(max(value, self.low)) if self.is_log else value

    def ticks(self, most: int = 5) -> list[float]:
        """Round values within, about ``most`` of them."""
        if not self.is_log:
            return _round_values(self.low, self.high, most)
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        each = max(1, ceil(len(decades) / most))
        parts = (1, 2, 5) if len(decades) <= 3 else (1,)
        found = [10.0**power * part for power in decades if power % each == 0 for part in parts]
        return [tick for tick in found if self.low <= tick <= self.high]


def scale_for(low: float, high: float, begin: float, end: float, *, may_log: bool) -> Scale:
    """A scale that shows values from ``low`` to ``high`` with some room; by their logarithm if they are far apart."""
    if may_log and low > 0 and high / low > WIDE:
        return Scale(low / 1.15, high * 1.15, begin, end, is_log=True)
    room = (high - low) * 0.06 or max(abs(high) * 0.05, 1e-9)
    bottom = 0.0 if low >= 0 and low - room < 0.25 * high else low - room
    return Scale(bottom, high + room, begin, end)


def _round_values(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most ``most`` + 1."""
    rough = (high - low) / most
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def tick_text(value: float) -> str:
    """``0``, ``0.25``, ``12k``, ``5e-4``."""
    size = abs(value)
    if 1e-15 < size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-") if size < 1e-4 else f"{value * 1e4:.3g}e-4"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= size < 1e12:
            return f"{value / limit:.4g}{unit}"
    return f"{0.0 if size < 1e-15 else value:.4g}"
