"""A quantity over the steps of a run of any length, thinned in bounded memory to some hundred points."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

#: The most points of a curve; above, two neighbours become one.
POINTS = 600


class Point(NamedTuple):
    """Neighbouring steps: the middle of them, and mean, lowest and highest of their values."""

    step: float
    mean: float
    low: float
    high: float


class At(NamedTuple):
    """A value and its step."""

    step: int
    value: float


@dataclass(frozen=True)
class Curve:
    """One quantity over the steps of a run; the numbers are those of all steps, the points are thinned."""

    points: tuple[Point, ...]
    count: int
    mean: float
    first: At
    last: At
    lowest: At
    highest: At


@dataclass(slots=True)
class _Sum:
    """Values of neighbouring steps: how many, their first and last step, their sum, the lowest and the highest."""

    count: int
    begin: int
    end: int
    total: float
    low: float
    low_step: int
    high: float
    high_step: int

    def add(self, step: int, value: float) -> None:
        """A value of a later step."""
        self.count += 1
        self.end = step
        self.total += value
        if value < self.low:
            self.low, self.low_step = value, step
        elif value > self.high:
            self.high, self.high_step = value, step

    def join(self, later: _Sum) -> None:
        """The values of the neighbours behind."""
        self.count, self.end, self.total = self.count + later.count, later.end, self.total + later.total
        if later.low < self.low:
            self.low, self.low_step = later.low, later.low_step
        if later.high > self.high:
            self.high, self.high_step = later.high, later.high_step


class Thinning:
    """The points of one curve while it grows; ``width`` neighbouring steps share one, a power of two."""

    def __init__(self, step: int, value: float) -> None:
        self._width = 1
        self._first = At(step, value)
        self._last: tuple[int, float] = self._first
        self._sums = {step: _Sum(1, step, step, value, value, step, value, step)}

    def add(self, step: int, value: float) -> None:
        """A value of a later step."""
        number = step // self._width
        there = self._sums.get(number)
        self._last = (step, value)
        if there is not None:
            there.add(step, value)
            return
        self._sums[number] = _Sum(1, step, step, value, value, step, value, step)
        while len(self._sums) > POINTS:
            self._halve()

    def _halve(self) -> None:
        finer, self._sums, self._width = self._sums, {}, self._width * 2
        for number, each in finer.items():  # in their order
            there = self._sums.setdefault(number // 2, each)
            if there is not each:
                there.join(each)

    def curve(self) -> Curve:
        """All that was added."""
        sums = [*self._sums.values()]
        lowest, highest = min(sums, key=lambda each: each.low), max(sums, key=lambda each: each.high)
        count = sum(each.count for each in sums)
        return Curve(
            tuple(Point((each.begin + each.end) / 2, each.total / each.count, each.low, each.high) for each in sums),
            count,
            sum(each.total for each in sums) / count,
            self._first,
            At(*self._last),
            At(lowest.low_step, lowest.low),
            At(highest.high_step, highest.high),
        )


def running_mean(points: Iterable[Point], window: int) -> list[Point]:
    """``points`` whose means are those of the ``window`` around each, fewer at the ends."""
    given = list(points)
    sums = [0.0]
    for point in given:
        sums.append(sums[-1] + point.mean)
    half = window // 2
    spans = ((max(0, i - half), min(len(given), i + half + 1)) for i in range(len(given)))
    return [
        point._replace(mean=(sums[end] - sums[begin]) / (end - begin))
        for point, (begin, end) in zip(given, islice(spans, len(given)), strict=True)
    ]
