"""Improves action lists step by step: an action on the critical path runs earlier, or another fills the gap before it.

The critical path is the chain of actions, each waiting for the one before it, that ends with the step; as in job-shop
scheduling, no change elsewhere can shorten the step. Worse lists are accepted within a tolerance that falls to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from megatron_run.contracts.schedule import Action
from megatron_run.pipeline.simulate import simulate
from megatron_run_planner.schedules.workload_costs import Placed

#: The tolerance at the start, as a share of the step.
_TOLERANCE = 0.004


def makespan(placed: Placed, lists: Sequence[Sequence[Action]]) -> float:
    """Seconds of the step. Raises ValueError when the lists deadlock."""
    return max(done[-1] for done in _ends(placed, lists))


def _ends(placed: Placed, lists: Sequence[Sequence[Action]]) -> tuple[tuple[float, ...], ...]:
    whole = placed.pipeline
    ends = simulate(placed.layout, whole.microbatches, lists, placed.costs, whole.message).ends
    if any(len(done) != len(actions) for done, actions in zip(ends, lists, strict=True)):
        raise ValueError("the lists deadlock")
    return ends


def split(actions: Sequence[Action]) -> list[Action]:
    """The same with each whole backward as its two halves, which can be moved apart."""
    halved: list[Action] = []
    for action in actions:
        halved += [action._replace(op="I"), action._replace(op="W")] if action.op == "B" else [action]
    return halved


def polished(placed: Placed, lists: Sequence[Sequence[Action]], random: Random, tries: int) -> list[list[Action]]:
    """The best lists of ``tries`` changes, one after the other, of ``lists``; stops at :attr:`Placed.bound`."""
    return _Polish(placed, lists, random).run(tries)


class _Polish:
    """The lists under change, when their actions end, and where each action stands."""

    def __init__(self, placed: Placed, lists: Sequence[Sequence[Action]], random: Random) -> None:
        self._placed, self._random = placed, random
        self._lists = [list(actions) for actions in lists]
        self._ends = _ends(placed, self._lists)
        self._positions = {(place.stage, place.chunk): k for k, place in enumerate(placed.layout)}
        self._path = self._critical()

    def run(self, tries: int) -> list[list[Action]]:
        best, kept = self._value(), [list(actions) for actions in self._lists]
        goal, current = self._placed.bound * (1 + 1e-9), best
        for attempt in range(tries):
            if best[0] <= goal:
                break
            stage, changed = self._change()
            if changed is None:
                continue
            before, self._lists[stage] = self._lists[stage], changed
            try:
                ends = _ends(self._placed, self._lists)
            except ValueError:
                self._lists[stage] = before
                continue
            value = max(done[-1] for done in ends), sum(done[-1] for done in ends)
            slack = _TOLERANCE * best[0] * (1 - attempt / tries) * self._random.random()
            if value > current and value[0] > current[0] + slack:
                self._lists[stage] = before
                continue
            current, self._ends = value, ends
            self._path = self._critical()
            if value < best:
                best, kept = value, [list(actions) for actions in self._lists]
        return kept

    def _value(self) -> tuple[float, float]:
        """The step's length; of equal ones, the stages' lengths."""
        return max(done[-1] for done in self._ends), sum(done[-1] for done in self._ends)

    def _change(self) -> tuple[int, list[Action] | None]:
        """A stage and its list with one action moved to an earlier place; None if that would be illegal."""
        stage, index = self._random.choice(self._path)
        actions = self._lists[stage]
        reach = 1 + int(self._random.expovariate(0.35))
        if self._random.random() < 0.5:
            source, target = index, max(0, index - reach)
        else:
            source, target = min(len(actions) - 1, index + reach), index
        moved, passed = actions[source], actions[target:source]
        # Of one chunk, microbatches keep their order and each its order of F, I and W.
        bound = (each for each in passed if each.chunk == moved.chunk)
        if source == target or any(each.op == moved.op or each.microbatch == moved.microbatch for each in bound):
            return stage, None
        changed = [*actions[:target], moved, *passed, *actions[source + 1 :]]
        return stage, changed if moved.op != "F" or self._fits(stage, changed[: source + 1]) else None

    def _fits(self, stage: int, actions: Sequence[Action]) -> bool:
        """Whether the stage has room for all that ``actions``, its first ones, hold at once."""
        held, room = 0.0, self._placed.room[stage] * (1 + 1e-9)
        for op, _, chunk in actions:
            if op in "FW":
                keeps = self._placed.works[self._positions[stage, chunk]].keeps
                held += keeps if op == "F" else -keeps
                if held > room:
                    return False
        return True

    def _critical(self) -> list[tuple[int, int]]:
        """The critical path as (stage, index in its list), from the end of the step."""
        lists, ends, last = self._lists, self._ends, len(self._placed.layout) - 1
        at = {
            (op, microbatch, self._positions[stage, chunk]): (stage, index)
            for stage, actions in enumerate(lists)
            for index, (op, microbatch, chunk) in enumerate(actions)
        }
        stage = max(range(len(lists)), key=lambda each: ends[each][-1])
        index, path = len(lists[stage]) - 1, list[tuple[int, int]]()
        while True:
            path.append((stage, index))
            op, microbatch, chunk = lists[stage][index]
            k = self._positions[stage, chunk]
            start = ends[stage][index] - self._placed.costs[k][op]
            waited = not index or ends[stage][index - 1] < start - 1e-9 * ends[stage][-1]
            if waited and op == "F" and k:
                stage, index = at["F", microbatch, k - 1]
            elif waited and op == "I" and k < last:
                stage, index = at["I", microbatch, k + 1]
            elif index:
                index -= 1
            else:
                return path
