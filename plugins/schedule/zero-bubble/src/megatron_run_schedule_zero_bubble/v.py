"""ZB-V: two chunks a stage in the shape of a V, so that the first stage has the embedding and the loss.

Chunk 0 goes down the stages, chunk 1 comes back up: with P stages, position k is chunk 0 of stage k, and position
``P+k`` is chunk 1 of stage ``P-1-k``. The last stage hands its output to itself, and the first input gradients are made
where the forwards begin.

Three ways lead to action lists, and the shortest step wins, counted in ticks of one operation each:

- **cycle**: on every stage ``F I W`` of chunk 0 and ``F I W`` of chunk 1 by turns, between a warm-up and a cool-down
  whose lengths follow from the stage (:func:`_cycle`). It is taken on a tie: its order does not depend on how long an
  operation takes, so that it waits least when chunks hold unequal numbers of layers, or the head.

The other two come from a list scheduler. At each tick every stage runs the first ready operation of a list of
preferences, in one of two habits:

- **prompt**: while a stage has forwards left, a weight gradient directly follows its input gradient. Otherwise forwards
  come first, of chunk 1 before chunk 0; then I and W of chunk 0; then I and W of chunk 1.
- **late**: a forward or an input gradient of chunk 1 comes first, since these lie on the path through the loss; then a
  forward of chunk 0; the rest fills the gaps. With few microbatches this saves some ticks.

The resulting phases: **warm-up**, forwards only, until the first microbatch is back on stage 0; **steady**, a forward,
an input gradient and a weight gradient by turns, of alternating chunks; **cool-down**, input gradients, with weight
gradients in every gap.

**Memory**: a stage holds a chunk-microbatch from its forward to its weight gradient, at most ``2P`` at once. A chunk is
half of a stage, so that is the memory of 1F1B's first stage, on every stage. The list scheduler reserves one place for
chunk 1, so that the oldest microbatch can always advance: it cannot deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, cast

from megatron_run.contracts import Schedule
from megatron_run.contracts.schedule import Action, LayoutSpec, Op, Place, ScheduleSpec, split_layers
from megatron_run.errors import ScheduleError
from megatron_run.pipeline.simulate import simulate


class _Habit(NamedTuple):
    """(operation, chunk) pairs by preference, and whether W directly follows I while forwards are left."""

    preference: tuple[tuple[Op, int], ...]
    prompt: bool


#: Tried in this order; on a tie the earlier one is taken.
_HABITS = (
    _Habit((("F", 1), ("F", 0), ("I", 0), ("W", 0), ("I", 1), ("W", 1)), prompt=True),
    _Habit((("F", 1), ("I", 1), ("F", 0), ("W", 0), ("I", 0), ("W", 1)), prompt=False),
)


class ZeroBubbleV(Schedule):
    """ZB-V over any number of stages with two chunks each."""

    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        """Chunk 0 down the stages, chunk 1 back up; raises :class:`ScheduleError` unless there are two chunks."""
        _check_chunks(spec.chunks)
        down = [(stage, 0) for stage in range(spec.stages)]
        up = [(stage, 1) for stage in reversed(range(spec.stages))]
        return tuple(Place(*where, layers) for where, layers in zip(down + up, split_layers(spec), strict=True))

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        """The lists of the shortest step; raises :class:`ScheduleError` unless there are two chunks."""
        _check_chunks(spec.chunks)
        lists = [_cycle(stage, spec.stages, spec.microbatches) for stage in range(spec.stages)]
        ends = simulate(spec.layout, spec.microbatches, lists, dict.fromkeys("FIW", 1.0)).ends
        steps = [_Step(int(max(end[-1] for end in ends)), lists)]
        steps += [_Run(spec.stages, spec.microbatches, habit).to_the_end() for habit in _HABITS]
        return min(steps, key=lambda step: step.ticks).lists


class _Step(NamedTuple):
    """The lists of all stages and their duration."""

    ticks: int
    lists: list[list[Action]]


def _cycle(stage: int, stages: int, microbatches: int) -> list[Action]:
    """The fixed order of ``stage``: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory".

    With ``below`` stages under this one, the first microbatch comes back up after ``2 * below`` forwards. A stage with
    ``stage`` stages above it puts off as many pairs of weight gradients at the end: these wait for its input gradients.
    """
    below = stages - 1 - stage
    turns = [
        *[("F", 0)] * (2 * below + 1),
        *[("F", 1), ("F", 0)] * stage,
        *[("FIW", 1)] * (below + 1),
        *[("FIW", 0), ("FIW", 1)] * (microbatches - stages),
        *[("I", 0), ("I", 1)] * stage,
        *[("IW", 0)] * microbatches,
        *[("W", 1)] * microbatches,
    ]
    actions: list[Action] = []
    done: Counter[tuple[Op, int]] = Counter()
    for ops, chunk in turns:
        for op in cast("Iterable[Op]", ops):
            if done[op, chunk] < microbatches:  # else there is nothing left to do in this turn
                actions.append(Action(op, done[op, chunk], chunk))
                done[op, chunk] += 1
    return actions


class _Run:
    """The state of the list scheduler.

    ``_done[op][k]`` counts the microbatches for which position k has done ``op``. Positions take microbatches in order,
    so the count is also the number of the next one.
    """

    def __init__(self, stages: int, microbatches: int, habit: _Habit) -> None:
        self._stages, self._microbatches, self._habit = stages, microbatches, habit
        self._done: dict[Op, list[int]] = {op: [0] * (2 * stages) for op in ("F", "I", "W")}
        self._last: list[tuple[Op, int] | None] = [None] * stages

    def to_the_end(self) -> _Step:
        """Run ticks until every weight gradient is made."""
        ticks, lists = 0, [list[Action]() for _ in range(self._stages)]
        while min(self._done["W"]) < self._microbatches:
            for stage, action in self._tick():
                lists[stage].append(action)
            ticks += 1
        return _Step(ticks, lists)

    def _tick(self) -> list[tuple[int, Action]]:
        """Run one operation on every stage that has one ready; all choose from the state before the tick."""
        chosen = [(stage, choice) for stage in range(self._stages) if (choice := self._choose(stage))]
        ran = []
        for stage, (op, chunk) in chosen:
            done, position = self._done[op], self._position(stage, chunk)
            ran.append((stage, Action(op, done[position], chunk)))
            done[position] += 1
            self._last[stage] = op, chunk
        return ran

    def _choose(self, stage: int) -> tuple[Op, int] | None:
        """The operation of ``stage`` in this tick; None to wait."""
        last = self._last[stage]
        if self._habit.prompt and last and last[0] == "I" and self._forwards_left(stage):
            return "W", last[1]
        room = 2 * self._stages - self._held(stage)
        for op, chunk in self._habit.preference:
            fits = op != "F" or room > (1 if chunk == 0 else 0)  # the last place is reserved for chunk 1
            position = self._position(stage, chunk)
            if fits and self._done[op][position] < self._inputs(op, position):
                return op, chunk
        return None

    def _inputs(self, op: Op, position: int) -> int:
        """The number of microbatches for which ``position`` has what ``op`` needs."""
        forwards, inputs = self._done["F"], self._done["I"]
        if op == "F":
            return forwards[position - 1] if position else self._microbatches
        if op == "W":
            return inputs[position]
        return inputs[position + 1] if position + 1 < len(inputs) else forwards[position]

    def _forwards_left(self, stage: int) -> bool:
        return any(self._done["F"][self._position(stage, chunk)] < self._microbatches for chunk in (0, 1))

    def _held(self, stage: int) -> int:
        """Number of chunk-microbatches of ``stage`` between forward and weight gradient."""
        positions = [self._position(stage, chunk) for chunk in (0, 1)]
        return sum(self._done["F"][position] - self._done["W"][position] for position in positions)

    def _position(self, stage: int, chunk: int) -> int:
        return 2 * self._stages - 1 - stage if chunk else stage


def _check_chunks(chunks: int) -> None:
    if chunks != 2:
        raise ScheduleError(
            f"zero-bubble variant v runs two chunks a stage, got parallel.chunks={chunks}",
            fix="set parallel.chunks=2, or choose schedule.variant=h1 with parallel.chunks=1",
        )
