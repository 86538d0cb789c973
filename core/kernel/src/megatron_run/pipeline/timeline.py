"""The timeline of a plan: when each action runs, how long a step takes, and which share of it is waiting. No torch.

Known formulas, for forwards of cost 1 and backwards of cost 2: the bubble fraction of 1F1B is ``(P-1) / (M+P-1)``, and
that of the interleaved schedule is ``(P-1) / (V*M+P-1)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, takewhile
from operator import itemgetter

from megatron_run.contracts.actions import Action
from megatron_run.contracts.observer import Bar, Timeline
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.simulate import simulate

_LEGEND = "digit: forward of that microbatch (its last digit); a, b, ...: backward of microbatch 0, 1, ..."
_LEGEND_SPLIT = "; A, B, ...: its weight gradient"


def timeline(plan: Plan, costs: Mapping[str, float] | None = None, stages: Collection[int] | None = None) -> Timeline:
    """When each action of ``plan`` runs if every operation takes its cost and messages take no time.

    ``costs`` defaults to those with which the plan was verified. With ``stages``, only the bars of these stages are
    made, which saves time if few are drawn.
    """
    ends = plan.ends
    if costs is None:
        costs = plan.costs
    elif costs != plan.costs:
        ends = simulate(plan.layout, plan.microbatches, plan.lists, costs).ends
    drawn = range(plan.stages) if stages is None else stages
    bars = tuple(
        tuple(_bars(actions, ends[stage], costs)) if stage in drawn else () for stage, actions in enumerate(plan.lists)
    )
    return Timeline(bars, max(done[-1] for done in ends), bubble_fraction(plan, ends, costs))


def bubble_fraction(plan: Plan, ends: Sequence[Sequence[float]], costs: Mapping[str, float]) -> float:
    """The share of the step, which lasts until the latest of ``ends``, that stages wait on average."""
    makespan = max(done[-1] for done in ends)
    counts = Counter(chain.from_iterable(map(itemgetter(0), actions) for actions in plan.lists))
    busy = sum(count * costs.get(op, 0.0) for op, count in counts.items())
    return 1 - busy / (makespan * plan.stages)


def _bars(actions: Sequence[Action], ends: Sequence[float], costs: Mapping[str, float]) -> Iterator[Bar]:
    starts = [end - costs.get(action[0], 0.0) for action, end in zip(actions, ends, strict=True)]
    return map(_bar, zip(actions, starts, ends, strict=True))


#: As ``Bar._make``, but without a Python frame per call: a long step has half a million bars.
_bar: Callable[[Iterable[object]], Bar] = partial(tuple.__new__, Bar)


def timeline_text(drawn: Timeline, width: int = 100, height: int = 24) -> str:
    """One line per stage, and a legend; a column is one unit of time and shows what runs at its middle.

    A step longer than ``width`` columns is cut to its beginning and end, with ``~`` between them; of more than
    ``height`` stages only the first and last are drawn.
    """
    total = max(1, round(drawn.makespan))
    head = total if total <= width else (width - 1) // 2
    tail = 0 if total <= width else width - 1 - head
    margin = len(str(len(drawn.stages) - 1))
    shown = shown_stages(len(drawn.stages), height)
    lines = [f"stage {stage:{margin}} |{_line(drawn.stages[stage], total, head, tail)}|" for stage in shown]
    legend = _LEGEND + (
        _LEGEND_SPLIT if any(bar.action.op == "W" for stage in shown for bar in drawn.stages[stage]) else ""
    )
    if len(shown) < len(drawn.stages):
        lines.insert(height // 2, f"... {len(drawn.stages) - len(shown)} stages more")
    if tail:
        legend += f"\n~: {total - head - tail} units of time are left out"
    return "\n".join([*lines, legend])


def shown_stages(stages: int, height: int = 24) -> Sequence[int]:
    """The stages that :func:`timeline_text` draws."""
    if stages <= height:
        return range(stages)
    return [*range(height // 2), *range(stages - height // 2, stages)]


def _line(bars: Sequence[Bar], total: int, head: int, tail: int) -> str:
    """The first ``head`` and the last ``tail`` of ``total`` columns; only bars inside them are visited."""
    first = ["."] * head
    for bar in takewhile(lambda bar: bar.start < head, bars):
        _draw(first, bar, 0)
    if not tail:
        return "".join(first)
    last = ["."] * tail
    for bar in takewhile(lambda bar: bar.end > total - tail, reversed(bars)):
        _draw(last, bar, total - tail)
    return f"{''.join(first)}~{''.join(last)}"


def _draw(cells: list[str], bar: Bar, offset: int) -> None:
    """Fill the columns in which ``bar`` runs; ``offset`` is the time at which the first column begins."""
    start = max(0, round(bar.start) - offset)
    end = min(len(cells), round(bar.end) - offset)
    cells[start:end] = [_letter(bar.action)] * (end - start)


def _letter(action: Action) -> str:
    """A digit for a forward, a lower-case letter for a backward, a capital for a weight gradient, + for a recompute."""
    if action.op == "F":
        return str(action.microbatch % 10)
    if action.op == "R":
        return "+"
    letter = chr(ord("a") + action.microbatch % 26)
    return letter.upper() if action.op == "W" else letter
