"""Which rank holds the others up, and in what: the time that each spends on its own work, waiting left out."""

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

#: What a rank does by itself. In all other phases it waits for others, or does what is no part of a step.
SECTIONS = ("data", "forward", "backward", "recompute", "optimizer")
#: Steps before each report that are timed.
_TIMED = 10
#: What a section must cost more than elsewhere to be worth a word, as a share of all that the rank does in a step.
_LEAST = 0.05


class Straggler(NamedTuple):
    """``rank`` takes ``seconds`` a step for ``section``, and those who do the same work ``typical``."""

    rank: int
    section: str
    seconds: float
    typical: float


class Stragglers:
    """Times the last steps before every ``interval``-th one, and compares the ranks after it. 0 is never.

    A change of phase costs one reading of the host's clock, or on a GPU one event in the stream, so that what the
    device does is timed and nobody waits for it.
    """

    def __init__(self, context: BuildContext, interval: int, factor: float) -> None:
        self._context, self._factor = context, factor
        self._interval = interval if context.topology.sizes.world > 1 else 0
        self._now, self._seconds = _clock(context.device)
        self._marks: list[tuple[str, Any]] = []
        self._step = self._over = 0

    def enter(self, step: int, name: str, detail: object) -> None:
        """Phase ``name`` begins in ``step``: a timer of the rank's phases."""
        if step < self._step:  # the run has gone back
            self._marks.clear()
            self._over = 0
        self._step = step
        if self._interval and -step % self._interval < _TIMED and step != self._over:
            self._marks.append((name, self._now()))
        if name == "observe":  # what comes now, an evaluation above all, is no part of any step
            self._over = step

    def report(self, step: int) -> Straggler | None:
        """Who held the others up in the last steps up to ``step``, when it is time to say. Collective."""
        if not self._interval or step % self._interval:
            return None
        steps = min(_TIMED, self._interval, step)
        own = [seconds / steps for seconds in section_seconds(self._marks, self._seconds)]
        self._marks.clear()
        topology = self._context.topology
        table = torch.zeros(topology.sizes.world, len(SECTIONS), dtype=torch.float64, device=self._context.device)
        table[topology.rank] = torch.tensor(own, dtype=torch.float64)
        rows = self._context.groups.sum_(table, "world").tolist()
        per_stage = topology.sizes.world // topology.sizes.pipeline
        return find_straggler(rows, [rank // per_stage for rank in range(len(rows))], self._factor)


def section_seconds(marks: Sequence[tuple[str, Any]], seconds: Callable[[Any, Any], float]) -> list[float]:
    """What each of ``SECTIONS`` took between ``marks``: a phase lasts until the next one begins."""
    spent: defaultdict[str, float] = defaultdict(float)
    for (name, start), (_, end) in pairwise(marks):
        spent[name] += seconds(start, end)
    return [spent[name] for name in SECTIONS]


def find_straggler(rows: Sequence[Sequence[float]], stages: Sequence[int], factor: float) -> Straggler | None:
    """Who costs the others most; ``rows`` are the seconds of each rank by section, ``stages`` the stage of each.

    A rank is compared with the median of the other ranks of its stage, which do the same work, and where it has its
    stage to itself with all others. It is one when it takes more than ``factor`` times as long.
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
    """What marks a moment, and the seconds between two of them once the step is over."""
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
