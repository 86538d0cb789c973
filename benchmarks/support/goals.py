"""Sides that are timed in turns, beside each other: whose time ours is compared with, and what the ratio should be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from benchmarks.support.quiet import ratio
from benchmarks.support.report import table


class Goal(NamedTuple):
    """The time of ``other`` over that of ``side`` is ``at least`` ``value``, or the inverse ``at most``."""

    side: str
    other: str
    bound: Literal["at least", "at most"]
    value: float


def goal_table(who: str, goals: Iterable[Goal], samples: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """A row a goal: what was measured in those ``samples`` in which neither side was disturbed."""
    yield from table(
        (f"{who} against", "measured", "goal", "met", "samples used"), (_row(*goal, samples) for goal in goals)
    )


def _row(side: str, other: str, bound: str, value: float, samples: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    least = bound == "at least"
    kept, measured = ratio(samples, *((other, side) if least else (side, other)))
    met = measured >= value if least else measured <= value
    what = "times its speed" if least else "of its time"
    return other, f"{measured:.3f} {what}", f"{bound} {value:.2f}", "yes" if met else "no", str(kept)


def apart_text(found: Mapping[str, Any], name: str) -> str:
    """How far the results of side ``name`` lie apart, of those that were compared."""
    apart = found["apart"].get(name)
    return "not compared" if apart is None else f"{apart:.0e}" if apart else "equal"
