"""Draw a plan: when each action runs, how long a step takes, how much of it is waiting. No torch.

Formulas to compare with, for forwards of cost 1 and backwards of cost 2: the bubble fraction of 1F1B is
``(P-1) / (M+P-1)`` and that of the interleaved schedule ``(P-1) / (V*M+P-1)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_run.actions import COSTS, Action
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.simulate import simulate

_LEGEND = "digit: forward of that microbatch (its last digit); a, b, ...: backward of microbatch 0, 1, ..."
_LEGEND_SPLIT = "; A, B, ...: its weight gradient"


class Bar(NamedTuple):
    """One action from ``start`` to ``end``, in units of one chunk's forward."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The bars of each stage, the time at which the last one ends, and the share of time stages wait on average."""

    stages: tuple[tuple[Bar, ...], ...]
    makespan: float
    bubble_fraction: float


def timeline(plan: Plan, costs: Mapping[str, float] = COSTS) -> Timeline:
    """When each action of ``plan`` runs if every operation takes its cost and messages take no time."""
    simulation = simulate(plan.layout, plan.microbatches, plan.lists, costs)
    bars: list[list[Bar]] = [[] for _ in plan.lists]
    for (stage, index), end in zip(simulation.order, simulation.ends, strict=True):
        action = plan.lists[stage][index]
        bars[stage].append(Bar(action, end - costs.get(action.op, 0.0), end))
    makespan = simulation.ends[-1]
    busy = sum(bar.end - bar.start for stage in bars for bar in stage) / len(bars)
    return Timeline(tuple(tuple(stage) for stage in bars), makespan, 1 - busy / makespan)


def timeline_text(drawn: Timeline, width: int = 100) -> str:
    """One line a stage, at most ``width`` columns of time, and a legend.

    A column is one unit of time, or more where the step is longer than ``width``; it shows what runs at its middle.
    """
    columns = max(1, min(width, round(drawn.makespan)))
    step = drawn.makespan / columns
    margin = len(str(len(drawn.stages) - 1))
    lines = [f"stage {stage:{margin}} |{_line(bars, columns, step)}|" for stage, bars in enumerate(drawn.stages)]
    split = any(bar.action.op == "W" for bars in drawn.stages for bar in bars)
    return "\n".join([*lines, _LEGEND + (_LEGEND_SPLIT if split else "")])


def _line(bars: Sequence[Bar], columns: int, step: float) -> str:
    cells = ["."] * columns
    for bar in bars:
        first, last = round(bar.start / step), round(bar.end / step)
        cells[first:last] = [_letter(bar.action)] * (last - first)
    return "".join(cells)


def _letter(action: Action) -> str:
    """A digit for a forward, a small letter for a backward, a capital for a weight gradient, + to recompute."""
    if action.op == "F":
        return str(action.microbatch % 10)
    if action.op == "R":
        return "+"
    letter = chr(ord("a") + action.microbatch % 26)
    return letter.upper() if action.op == "W" else letter
