"""Simulates action lists: every stage runs its list in order, each action as soon as its input exists.

An F waits for the F of the previous position, a B or I for the B or I of the next position; there are no other
dependencies between stages. Inputs and results are integers for speed, since plans of half a million actions are
common: with n positions and M microbatches, the activation of microbatch ``m`` out of position ``k`` is ``k*M + m``,
the gradient out of it is ``(n+k)*M + m``.

The timeline of a plan says when each action runs, how long a step takes, and which share of it is waiting. Known
formulas, for forwards of cost 1 and backwards of cost 2: the bubble fraction of 1F1B is ``(P-1) / (M+P-1)``, and that
of the interleaved schedule is ``(P-1) / (V*M+P-1)``. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile
from operator import itemgetter

from megatron_run.contracts.observer import Bar, Timeline
from megatron_run.contracts.schedule import COSTS, Action, Place
from megatron_run.pipeline.plan import Plan

#: operation -> chunk -> (input it waits for, result it produces, its cost, the time until its result has arrived); the
#: first two for microbatch 0.
Edges = dict[str, list[tuple[int, int, float, float]]]
_LEGEND = "digit: forward of that microbatch (its last digit); a, b, ...: backward of microbatch 0, 1, ..."
_LEGEND_SPLIT = "; A, B, ...: its weight gradient"


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result: ``ends`` holds, per stage, the time at which each action of its list ends.

    A stage with fewer ends than actions is stuck at the next action: the lists deadlock.
    """

    ends: tuple[tuple[float, ...], ...]


def simulate(
    layout: Sequence[Place],
    microbatches: int,
    lists: Sequence[Sequence[Action]],
    costs: Mapping[str, float] | Sequence[Mapping[str, float]] = COSTS,
    message: float = 0.0,
) -> Simulation:
    """Run ``lists`` until every stage is done or stuck; an operation absent from ``costs`` is free.

    ``costs`` are those of every place, or one mapping per position of ``layout``. A result reaches another stage
    ``message`` later than it exists; the sender does not wait.

    A stage runs until its next input does not exist yet; the action that produces this input wakes it. So every action
    is visited once, and the time is linear in their number.
    """
    each = [costs] * len(layout) if isinstance(costs, Mapping) else costs
    edges = _edges(layout, microbatches, len(lists), each, message)
    ready_at: list[float | None] = [None] * (2 * len(layout) * microbatches)
    ready_at += [0.0] * (2 * microbatches)
    ends: list[list[float]] = [[] for _ in lists]
    waiting: dict[int, int] = {}
    awake = list(range(len(lists)))
    while awake:
        stage = awake.pop()
        edge_of, done = edges[stage], ends[stage]
        now, actions = done[-1] if done else 0.0, lists[stage]
        for index in range(len(done), len(actions)):
            op, microbatch, chunk = actions[index]
            awaits, result, cost, travel = edge_of[op][chunk]
            ready = ready_at[awaits + microbatch]
            if ready is None:
                waiting[awaits + microbatch] = stage
                break
            now = (ready if ready > now else now) + cost
            done.append(now)
            ready_at[result + microbatch] = now + travel
            if result + microbatch in waiting:
                awake.append(waiting.pop(result + microbatch))
    return Simulation(tuple(map(tuple, ends)))


def completion_order(ends: Sequence[Sequence[float]]) -> tuple[tuple[int, int], ...]:
    """Every action as (stage, index in its list), sorted by the time at which it ends, ties by stage.

    It is a linear extension of the action graph if all actions whose results cross stages take time
    (:func:`takes_time`): otherwise an action and the one that waits for it may end at the same time.
    """
    numbered = [(stage, index) for stage, done in enumerate(ends) for index in range(len(done))]
    times = list(chain.from_iterable(ends))
    return tuple([numbered[slot] for slot in sorted(range(len(times)), key=times.__getitem__)])


def takes_time(costs: Mapping[str, float], simulation: Simulation) -> bool:
    """Whether every operation for which another stage may wait (F, B, I) advanced the clock, even at the step's end.

    A cost so small that floating-point addition rounds it away counts as none. The test uses half of each cost, so that
    the whole cost counts whichever way a sum is rounded.
    """
    makespan = max((done[-1] for done in simulation.ends if done), default=0.0)
    return all(makespan + costs.get(op, 0.0) / 2 > makespan for op in "FBI")


def _edges(
    layout: Sequence[Place], microbatches: int, stages: int, costs: Sequence[Mapping[str, float]], message: float
) -> list[Edges]:
    """The edges of each stage; ``costs`` are those of each position.

    Two ranges of integers stand for no message: inputs that always exist, and results for which no action waits.
    """
    n = len(layout)
    always = 2 * n * microbatches
    unused = always + microbatches
    chunks = 1 + max(place.chunk for place in layout)
    edges: list[Edges] = [{op: [(always, unused, 0.0, 0.0)] * chunks for op in "FBIWSR"} for _ in range(stages)]
    for position, place in enumerate(layout):
        activation, gradient = position * microbatches, (n + position) * microbatches
        before = activation - microbatches if position else always
        after = gradient + microbatches if position + 1 < n else always
        row, cost = edges[place.stage], costs[position]
        for op in "WSR":
            row[op][place.chunk] = (always, unused, cost.get(op, 0.0), 0.0)
        onward = message if position + 1 < n and layout[position + 1].stage != place.stage else 0.0
        back = message if position and layout[position - 1].stage != place.stage else 0.0
        row["F"][place.chunk] = (before, activation, cost.get("F", 0.0), onward)
        for op in "BI":
            row[op][place.chunk] = (after, gradient, cost.get(op, 0.0), back)
    return edges


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
    return max(0.0, 1 - busy / (makespan * plan.stages))


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
