"""The input of a search for a schedule, and a time that no answer can beat.

A position is a place of the layout in model order, ``k``. A (microbatch, chunk) pair holds the bytes of its place from
its forward to its weight gradient, as :attr:`~megatron_run.pipeline.plan.Plan.peak_held` counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import NamedTuple

from megatron_run.contracts.schedule import Action, Place
from megatron_run.pipeline.plan import activations


class Work(NamedTuple):
    """Of one microbatch: seconds of forward, input gradient and weight gradient, and bytes that it ``keeps`` between.

    ``state`` is in bytes too, and always there: weights, gradients, what the optimizer has.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    keeps: float = 0.0
    state: float = 0.0

    @property
    def seconds(self) -> float:
        """All three."""
        return self.forward + self.input_gradient + self.weight_gradient

    def plus(self, other: Work) -> Work:
        """Both."""
        return Work(*(one + two for one, two in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Pipeline:
    """The work of every layer, of what precedes the ``first`` and of what follows the ``last``, and what runs it.

    A result is ``message`` seconds on its way to another stage. ``memory``: bytes of a rank for state and activations.
    ``shared``: bytes of state that ``before`` and ``after`` have in common when one stage has both, as tied embeddings.
    """

    layers: tuple[Work, ...]
    before: Work
    after: Work
    stages: int
    chunks: int
    microbatches: int
    message: float = 0.0
    memory: float = inf
    shared: float = 0.0

    def placed(self, layout: Sequence[Place]) -> Placed:
        """The pipeline with its layers in ``layout``."""
        return Placed(self, tuple(layout))


@dataclass(frozen=True)
class Placed:
    """A pipeline whose layers have places."""

    pipeline: Pipeline
    layout: tuple[Place, ...]

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """The work at each position."""
        none, whole = Work(0.0, 0.0, 0.0), self.pipeline
        sums = [none] * len(self.layout)
        for position, place in enumerate(self.layout):
            for layer in place.layers:
                sums[position] = sums[position].plus(whole.layers[layer])
        sums[0] = sums[0].plus(whole.before)
        sums[-1] = sums[-1].plus(whole.after)
        return tuple(sums)

    @cached_property
    def costs(self) -> list[dict[str, float]]:
        """Seconds of each operation at each position, as :func:`~megatron_run.pipeline.simulate.simulate` takes them.

        ``R`` is left out: a recomputation is part of what the works were measured with.
        """
        return [
            {
                "F": each.forward,
                "I": each.input_gradient,
                "W": each.weight_gradient,
                "B": each.input_gradient + each.weight_gradient,
            }
            for each in self.works
        ]

    @cached_property
    def on_stage(self) -> tuple[tuple[int, ...], ...]:
        """The positions of each stage, in model order."""
        found: list[list[int]] = [[] for _ in range(self.pipeline.stages)]
        for position, place in enumerate(self.layout):
            found[place.stage].append(position)
        return tuple(map(tuple, found))

    @cached_property
    def room(self) -> tuple[float, ...]:
        """Bytes of each stage's ranks for activations: what the state of its layers leaves, negative if it misses."""
        state = [sum(self.works[k].state for k in positions) for positions in self.on_stage]
        if self.layout[0].stage == self.layout[-1].stage:
            state[self.layout[0].stage] -= self.pipeline.shared
        return tuple(self.pipeline.memory - each for each in state)

    @cached_property
    def overfull(self) -> float:
        """Bytes that miss for one microbatch to pass: 0 where a legal order exists."""
        least = [sum(self.works[k].keeps for k in positions) for positions in self.on_stage]
        return sum(max(0.0, need - room) for need, room in zip(least, self.room, strict=True))

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Seconds that each stage computes in a step."""
        seconds = (sum(self.works[k].seconds for k in positions) for positions in self.on_stage)
        return tuple(self.pipeline.microbatches * each for each in seconds)

    def hop(self, position: int, target: int) -> float:
        """Seconds that a result travels between two positions."""
        return self.pipeline.message if self.layout[position].stage != self.layout[target].stage else 0.0

    def fits(self, lists: Sequence[Sequence[Action]]) -> bool:
        """Whether every stage keeps to its room while it runs its list."""
        return all(held <= room * (1 + 1e-9) for held, room in zip(self.peaks(lists), self.room, strict=True))

    def peaks(self, lists: Sequence[Sequence[Action]]) -> list[float]:
        """The most bytes of activations that each stage holds."""
        return [
            max(
                accumulate(
                    change * kept[a.chunk] for change, a in zip(activations(actions, "BW"), actions, strict=True)
                )
            )
            for actions, kept in zip(lists, self._kept, strict=True)
        ]

    @cached_property
    def _kept(self) -> tuple[Mapping[int, float], ...]:
        return tuple({self.layout[k].chunk: self.works[k].keeps for k in positions} for positions in self.on_stage)

    @cached_property
    def bound(self) -> float:
        """Seconds that no order of these places can beat.

        A stage computes all its microbatches one after the other, begins when the first one can have reached it, and
        has only forwards to do until the first gradient can have come back, no more of them than its memory holds. And
        one microbatch must travel there and back.
        """
        arrives, returns, there_and_back = self._first_microbatch()
        best = there_and_back
        for positions, load, room in zip(self.on_stage, self.loads, self.room, strict=True):
            idle = max(arrives[positions[0]], returns[positions[-1]] - self._forwards_in(positions, room))
            best = max(best, idle + load)
        return best

    def _first_microbatch(self) -> tuple[list[float], list[float], float]:
        """When the first microbatch's forward and input gradient can begin at each position, and when the last ends."""
        works, last = self.works, len(self.works) - 1
        arrives = [0.0] * len(works)
        for k in range(1, len(works)):
            arrives[k] = arrives[k - 1] + works[k - 1].forward + self.hop(k - 1, k)
        returns, clock = [0.0] * len(works), arrives[last] + works[last].forward
        for k in range(last, -1, -1):
            returns[k] = clock
            clock += works[k].input_gradient + (self.hop(k, k - 1) if k else 0.0)
        return arrives, returns, clock

    def _forwards_in(self, positions: Sequence[int], room: float) -> float:
        """Seconds of forwards that a stage can do before it must free memory: a knapsack, filled by fractions."""
        seconds = 0.0
        for k in sorted(positions, key=lambda k: -self.works[k].forward / max(self.works[k].keeps, 1e-30)):
            work = self.works[k]
            count = min(self.pipeline.microbatches, max(0.0, room) / work.keeps if work.keeps else inf)
            seconds += count * work.forward
            room -= count * work.keeps
        return seconds
