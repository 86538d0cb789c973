"""Action lists by rules: whenever a stage is free, it runs the best of what is ready, as long as memory lasts.

The rules are a :class:`Habit`. Microbatches pass each position in order, so that gradients add up as in ``sequential``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from random import Random
from typing import NamedTuple

from megatron_run.contracts.schedule import Action, Op
from megatron_run_planner.schedules.workload_costs import Placed


@dataclass(frozen=True)
class Habit:
    """How a stage chooses.

    Of operations that are ready at the same time, the one at ``rank[operation][position]`` that is highest. A weight
    gradient fills a gap of at least ``fill`` of its length, or with ``prompt`` follows its input gradient directly
    while forwards are left.
    """

    rank: dict[str, tuple[float, ...]]
    fill: float
    prompt: bool

    def disturbed(self, random: Random, amount: float = 0.3) -> Habit:
        """One much like it."""
        rank = {op: tuple(each + random.gauss(0, amount) for each in values) for op, values in self.rank.items()}
        return Habit(rank, min(1.5, max(0.0, self.fill + random.gauss(0, amount))), self.prompt)


def habits(positions: int) -> Iterator[Habit]:
    """Forwards first, gradients first, or forwards of the model's second half first; each by depth or by breadth."""
    depth = [k / positions for k in range(positions)]
    for first, forwards, gradients, fill, prompt in product("FIL", (1, -1), (1, -1), (0.0, 0.5, 1.0), (True, False)):
        late = [3.0 * (first == "L" and each >= 0.5) for each in depth]
        yield Habit(
            {
                "F": tuple(
                    2.0 * (first == "F") + forwards * each + more for each, more in zip(depth, late, strict=True)
                ),
                "I": tuple(2.0 * (first != "F") + gradients * each for each in depth),
                "W": tuple(gradients * each for each in depth),
            },
            fill,
            prompt,
        )


class _Choice(NamedTuple):
    start: float
    op: Op
    position: int


def greedy_lists(placed: Placed, habit: Habit) -> list[list[Action]]:
    """The lists of all stages; legal, and within each stage's room, if :attr:`Placed.overfull` is 0."""
    return _Run(placed, habit).to_the_end()


class _Run:
    """The stages while they choose, in the order of time.

    ``_done[op][k]`` counts the microbatches for which position k has done ``op``; the count is also the number of the
    next one. ``_ready[op][k]`` are the times at which the inputs of its microbatches are there, as far as they are
    known.
    """

    def __init__(self, placed: Placed, habit: Habit) -> None:
        self._placed, self._habit = placed, habit
        positions, stages = len(placed.layout), placed.pipeline.stages
        self._count = placed.pipeline.microbatches
        self._done: dict[str, list[int]] = {op: [0] * positions for op in "FIW"}
        self._ready: dict[str, list[list[float]]] = {op: [[] for _ in range(positions)] for op in "FI"}
        self._ready["F"][0] = [0.0] * self._count
        self._now, self._held = [0.0] * stages, [0.0] * stages
        self._owes: list[int | None] = [None] * stages
        self._lists: list[list[Action]] = [[] for _ in range(stages)]
        keeps = [work.keeps for work in placed.works]
        # A forward leaves room for the later chunks of its stage, so that the oldest microbatch can always go on.
        self._needs = [
            keeps[k] + sum(keeps[other] for other in placed.on_stage[place.stage] if other > k)
            for k, place in enumerate(placed.layout)
        ]

    def to_the_end(self) -> list[list[Action]]:
        """Run every microbatch: of all stages' next choices, the one that starts first is carried out."""
        heap: list[tuple[float, int, int]] = []
        chosen: list[_Choice | None] = [None] * len(self._now)
        versions = [0] * len(self._now)

        def choose(stage: int) -> None:
            choice = chosen[stage] = self._choose(stage)
            versions[stage] += 1
            if choice:
                heappush(heap, (choice.start, stage, versions[stage]))

        for stage in range(len(self._now)):
            choose(stage)
        while heap:
            _, stage, version = heappop(heap)
            choice = chosen[stage]
            if version != versions[stage] or choice is None:
                continue
            receiver = self._carry_out(stage, choice)
            choose(stage)
            if receiver is not None and receiver != stage:
                choose(receiver)
        return self._lists

    def _choose(self, stage: int) -> _Choice | None:
        """The next action of ``stage``, and when; None until a message arrives."""
        now, owed, done = self._now[stage], self._owes[stage], self._done
        if owed is not None and self._habit.prompt and done["F"][owed] < self._count:
            return _Choice(now, "W", owed)
        positions = self._placed.on_stage[stage]
        best = self._passing(stage, positions, now)
        waiting = [k for k in positions if done["W"][k] < done["I"][k]]
        if waiting:
            k = max(waiting, key=self._habit.rank["W"].__getitem__)
            gap = self._habit.fill * self._placed.works[k].weight_gradient
            if best is None or (best.start > now and best.start >= now + gap):
                return _Choice(now, "W", k)
        return best

    def _passing(self, stage: int, positions: tuple[int, ...], now: float) -> _Choice | None:
        """The forward or input gradient that can start first."""
        done, rank = self._done, self._habit.rank
        free = self._placed.room[stage] * (1 + 1e-9) - self._held[stage]
        best: tuple[float, float, _Choice] | None = None
        ops: tuple[Op, ...] = ("I", "F")
        for k in positions:
            for op in ops:
                index, times = done[op][k], self._ready[op][k]
                if index >= len(times) or (op == "F" and self._needs[k] > free):
                    continue
                start = max(now, times[index])
                if best is None or (start, -rank[op][k]) < best[:2]:
                    best = start, -rank[op][k], _Choice(start, op, k)
        return best[2] if best else None

    def _carry_out(self, stage: int, choice: _Choice) -> int | None:
        """Let ``stage`` run what it chose; returns the stage that it sends a message."""
        start, op, k = choice
        placed, work = self._placed, self._placed.works[k]
        self._lists[stage].append(Action(op, self._done[op][k], placed.layout[k].chunk))
        self._done[op][k] += 1
        self._owes[stage] = k if op == "I" else None
        if op == "W":
            self._now[stage] = start + work.weight_gradient
            self._held[stage] -= work.keeps
            return None
        end = self._now[stage] = start + (work.forward if op == "F" else work.input_gradient)
        self._held[stage] += work.keeps if op == "F" else 0.0
        target = k + 1 if op == "F" else k - 1
        if target == len(placed.works):
            self._ready["I"][k].append(end)
        elif target >= 0:
            self._ready[op][target].append(end + placed.hop(k, target))
            return placed.layout[target].stage
        return None
