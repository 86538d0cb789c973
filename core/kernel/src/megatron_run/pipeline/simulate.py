"""Simulates action lists: every stage runs its list in order, each action as soon as its input exists.

An F waits for the F of the previous position, a B or I for the B or I of the next position; there are no other
dependencies between stages. Inputs and results are integers for speed, since plans of half a million actions are
common: with n positions and M microbatches, the activation of microbatch ``m`` out of position ``k`` is ``k*M + m``,
the gradient out of it is ``(n+k)*M + m``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_run.contracts.actions import COSTS, Action, Place

#: operation -> chunk -> (input it waits for, result it produces, its cost, the time until its result has arrived); the
#: first two for microbatch 0.
Edges = dict[str, list[tuple[int, int, float, float]]]


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
        mine, cost = edges[place.stage], costs[position]
        for op in "WSR":
            mine[op][place.chunk] = (always, unused, cost.get(op, 0.0), 0.0)
        onward = message if position + 1 < n and layout[position + 1].stage != place.stage else 0.0
        back = message if position and layout[position - 1].stage != place.stage else 0.0
        mine["F"][place.chunk] = (before, activation, cost.get("F", 0.0), onward)
        for op in "BI":
            mine[op][place.chunk] = (after, gradient, cost.get(op, 0.0), back)
    return edges
