"""Run action lists on paper: every stage in order, each action as soon as what it waits for is there.

An F waits for the F of the position before it, a B or I for the B or I of the position after it; nothing else crosses
stages. What an action waits for and what it makes are kept as integers, since plans of half a million actions are
ordinary: the activation of microbatch ``m`` that leaves position ``k`` is ``k*M + m``, the gradient is ``(n+k)*M + m``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_run.actions import COSTS, Action, Place


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened: ``order`` holds (stage, index) by completion time, ties by stage; ``ends`` the time of each.

    ``heads`` is the index, per stage, of the first action that never ran: the list's length unless it deadlocked.
    """

    order: tuple[tuple[int, int], ...]
    ends: tuple[float, ...]
    heads: tuple[int, ...]


def simulate(
    layout: Sequence[Place],
    microbatches: int,
    lists: Sequence[Sequence[Action]],
    costs: Mapping[str, float] = COSTS,
) -> Simulation:
    """Run ``lists`` until every stage is done or none can go on; an operation absent from ``costs`` is free."""
    edges, nothing = _edges(layout, microbatches, len(lists), costs)
    made = bytearray(nothing + microbatches)
    made[nothing:] = b"\1" * microbatches
    heads = [0] * len(lists)
    waiting: dict[int, int] = {}
    running: list[tuple[float, int]] = []
    order, ends = [], []

    def start(stage: int, now: float) -> None:
        """Begin the stage's next action at ``now``, or leave the stage waiting for its input."""
        if heads[stage] == len(lists[stage]):
            return
        op, microbatch, chunk = lists[stage][heads[stage]]
        awaits, _, cost = edges[stage][op, chunk]
        if made[awaits + microbatch]:
            heappush(running, (now + cost, stage))
        else:
            waiting[awaits + microbatch] = stage

    for stage in range(len(lists)):
        start(stage, 0.0)
    while running:
        now, stage = heappop(running)
        op, microbatch, chunk = lists[stage][heads[stage]]
        order.append((stage, heads[stage]))
        ends.append(now)
        heads[stage] += 1
        product = edges[stage][op, chunk][1] + microbatch
        made[product] = 1
        if product in waiting:
            start(waiting.pop(product), now)
        start(stage, now)
    return Simulation(tuple(order), tuple(ends), tuple(heads))


def _edges(
    layout: Sequence[Place], microbatches: int, stages: int, costs: Mapping[str, float]
) -> tuple[list[dict[tuple[str, int], tuple[int, int, float]]], int]:
    """Per stage, (op, chunk) -> (what it waits for, what it makes, its cost), and the number that stands for nothing.

    The first two are for microbatch 0: add the microbatch. ``nothing`` is always there, and nobody waits for it.
    """
    n = len(layout)
    nothing = 2 * n * microbatches
    edges: list[dict[tuple[str, int], tuple[int, int, float]]] = [{} for _ in range(stages)]
    for position, place in enumerate(layout):
        activation, gradient = position * microbatches, (n + position) * microbatches
        before = activation - microbatches if position else nothing
        after = gradient + microbatches if position + 1 < n else nothing
        for op in "FBIWSR":
            awaits, makes = nothing, nothing
            if op == "F":
                awaits, makes = before, activation
            elif op in "BI":
                awaits, makes = after, gradient
            edges[place.stage][op, place.chunk] = (awaits, makes, costs.get(op, 0.0))
    return edges, nothing
