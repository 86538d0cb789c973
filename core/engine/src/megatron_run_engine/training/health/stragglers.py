"""Finds the rank that slows the others down, from the time each rank spends on its own work, without waiting."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_run_engine.runtime.context import BuildContext

#: Activities in which a rank computes alone. In all others it waits for ranks, or does work outside of a step.
SECTIONS = ("data", "forward", "backward", "recompute", "optimizer")
#: Number of steps timed before each report.
_TIMED = 10
#: A section is reported only if its excess over other ranks is at least this share of the rank's work in a step.
_LEAST = 0.05


class Straggler(NamedTuple):
    """``rank`` takes ``seconds`` per step for ``section``; ranks with the same work take ``typical``."""

    rank: int
    section: str
    seconds: float
    typical: float


class Stragglers:
    """Times the last steps before every ``interval``-th step and compares the ranks after it. 0 disables it.

    A change of activity costs one reading of the host's clock, or one event in the stream on a GPU. Events time the
    device's work without making the host wait.
    """

    def __init__(self, context: BuildContext, interval: int, factor: float) -> None:
        self._context, self._factor = context, factor
        self._interval = interval if context.topology.sizes.world > 1 else 0
        self._now, self._seconds = _clock(context.device)
        self._marks: list[tuple[str, Any]] = []
        self._step = self._over = 0
        #: How many of the last reports, one after the other, have named the rank of the last one among those that do
        #: the same. A rank that has its stage to itself is not counted: the stages may be uneven, and the rank sound.
        self.in_a_row = 0
        self._last: int | None = None

    def enter(self, step: int, name: str, detail: object) -> None:
        """Record that activity ``name`` begins in ``step``."""
        if step < self._step:  # the run was rewound
            self._marks.clear()
            self._over = 0
        self._step = step
        if self._interval and -step % self._interval < _TIMED and step != self._over:
            self._marks.append((name, self._now()))
        if name == "observe":  # what follows, such as an evaluation, belongs to no step
            self._over = step

    def report(self, step: int) -> Straggler | None:
        """Return the straggler of the last steps up to ``step``, if a report is due. Collective."""
        if not self._interval or step % self._interval:
            return None
        steps = min(_TIMED, self._interval, step)
        own = [seconds / steps for seconds in section_seconds(self._marks, self._seconds)]
        self._marks.clear()
        topology = self._context.topology
        # A gather as one all-reduce: each rank fills its own row.
        table = torch.zeros(topology.sizes.world, len(SECTIONS), dtype=torch.float64, device=self._context.device)
        table[topology.rank] = torch.tensor(own, dtype=torch.float64)
        rows = self._context.groups.sum_(table, "world").tolist()
        per_stage = topology.sizes.world // topology.sizes.pipeline
        found = find_straggler(rows, [rank // per_stage for rank in range(len(rows))], self._factor)
        named = found.rank if found is not None and per_stage > 1 else None
        self.in_a_row = 0 if named is None else self.in_a_row + 1 if named == self._last else 1
        self._last = named
        return found


def section_seconds(marks: Sequence[tuple[str, Any]], seconds: Callable[[Any, Any], float]) -> list[float]:
    """Return the seconds of each of ``SECTIONS`` between ``marks``. An activity lasts until the next one begins."""
    spent: defaultdict[str, float] = defaultdict(float)
    for (name, start), (_, end) in pairwise(marks):
        spent[name] += seconds(start, end)
    return [spent[name] for name in SECTIONS]


def find_straggler(rows: Sequence[Sequence[float]], stages: Sequence[int], factor: float) -> Straggler | None:
    """Return the rank with the largest excess. ``rows`` are the seconds by rank and section, ``stages`` by rank.

    A rank is compared with the median of the other ranks of its stage, which do the same work. If it is alone on its
    stage, it is compared with all other ranks. It is a straggler if it takes more than ``factor`` times the median.
    """
    found: list[tuple[float, Straggler]] = []
    for rank, row in enumerate(rows):
        others = [other for other in range(len(rows)) if other != rank]
        alike = [other for other in others if stages[other] == stages[rank]] or others
        for section, seconds in zip(SECTIONS, row, strict=True):
            typical = median(rows[other][SECTIONS.index(section)] for other in alike)
            if seconds > factor * typical and seconds - typical > _LEAST * sum(row):
                found.append((seconds - typical, Straggler(rank, section, seconds, typical)))
    return max(found)[1] if found else None


def _clock(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return a function that marks a moment, and one that returns the seconds between two marks."""
    if device.type != "cuda":
        return time.perf_counter, lambda start, end: float(end - start)

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return mark, seconds
