"""The contract of kind ``schedule``: the places of layers, and the order in which microbatches run.

Actions, places and the specs that a schedule receives are its vocabulary: pure data, no torch.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_run.errors import InputError, ScheduleError
from megatron_run.errors.wording import nearest_multiples, plural

Op = Literal["F", "B", "I", "W", "S", "R"]

#: Cost of each operation in units of one forward; a full backward is an input plus a weight gradient.
COSTS: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1, "S": 0, "R": 1}

_TEXT = re.compile(r"([FBIWSR])(\d+)\.(\d+)")


class Action(NamedTuple):
    """One unit of work of one stage: an operation on a microbatch in a chunk.

    ``F``: forward. ``B``: whole backward. ``I`` and ``W``: the two halves of ``B``, input gradient and weight gradient.
    ``S``: start the gradient sync of a chunk (its microbatch is 0). ``R``: recompute a checkpointed forward early.
    """

    op: Op
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}.{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the form that ``str`` writes: ``F3.1`` is the forward of microbatch 3 in chunk 1."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action", why="an action reads like F3.1 or B0.0")
        op: Op = match[1]  # type: ignore[assignment]  # the pattern admits nothing else
        return cls(op, int(match[2]), int(match[3]))


class Place(NamedTuple):
    """The layers of one chunk of one stage. A layout lists places in model order; a place's index is its position."""

    stage: int
    chunk: int
    layers: range


@dataclass(frozen=True)
class LayoutSpec:
    """The request for a layout: ``layers`` transformer layers over ``stages`` x ``chunks`` places.

    ``counts`` is the number of layers of each place in model order if the user gave it, otherwise empty: an even split.
    """

    stages: int
    chunks: int
    layers: int
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScheduleSpec:
    """The request for action lists. ``costs`` are per operation, in units of one chunk's forward."""

    layout: tuple[Place, ...]
    stages: int
    chunks: int
    microbatches: int
    costs: Mapping[str, float] = field(default_factory=lambda: dict(COSTS))


def check_counts(spec: LayoutSpec) -> None:
    """Raise :class:`InputError` if the user's counts are not one per place, or do not add up to the layers."""
    places = spec.stages * spec.chunks
    if not spec.counts:
        return
    if len(spec.counts) != places:
        raise InputError(
            f"parallel.layers has {plural(len(spec.counts), 'count')} for {_shape(spec)}",
            fix=f"give {places} counts, in model order",
        )
    if min(spec.counts) < 0 or sum(spec.counts) != spec.layers:
        raise InputError(
            f"parallel.layers adds up to {sum(spec.counts)}, the model has {plural(spec.layers, 'layer')}",
            fix=f"give {places} counts of at least 0 that add up to {spec.layers}",
        )


def _shape(spec: LayoutSpec) -> str:
    return f"{plural(spec.stages, 'stage')} x {plural(spec.chunks, 'chunk')}"


def split_layers(spec: LayoutSpec) -> tuple[range, ...]:
    """The layers of each of the ``stages * chunks`` places, in model order; no layer is dropped.

    Raises :class:`InputError` if an even split leaves a remainder or the user's counts do not add up.
    """
    places = spec.stages * spec.chunks
    check_counts(spec)
    counts = spec.counts or (spec.layers // places,) * places
    if not spec.counts and spec.layers % places:
        raise InputError(
            f"{plural(spec.layers, 'layer')} do not divide over {_shape(spec)} = {places} places",
            fix=f"set model.num_layers to {nearest_multiples(spec.layers, places)}, choose parallel.pipeline x "
            f"parallel.chunks that divide {spec.layers}, or give parallel.layers as {places} counts",
        )
    starts = [sum(counts[:index]) for index in range(places)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def looped_layout(spec: LayoutSpec) -> tuple[Place, ...]:
    """The layout of Megatron's pipelines: position ``i`` on stage ``i % P``, chunk ``i // P``.

    With one chunk the stages hold contiguous layers; with V chunks, chunk v of stage p starts at layer
    ``v*(L/V) + p*(L/(P*V))``.
    """
    layers = split_layers(spec)
    return tuple(Place(index % spec.stages, index // spec.stages, part) for index, part in enumerate(layers))


def signed_order(actions: Sequence[Action]) -> list[int]:
    """The actions as signed integers, as Megatron-LM writes an order: F is ``chunk + 1``, B or I ``-(chunk + 1)``."""
    sign = {"F": 1, "B": -1, "I": -1}
    return [sign[action.op] * (action.chunk + 1) for action in actions if action.op in sign]


class Schedule(ABC):
    """A pipeline schedule: two pure functions, from which the kernel derives everything else.

    From the action lists follow the messages, the gradient-sync points, the activations in flight, the bubble, the
    timeline, and the proof that nothing deadlocks and every send meets its receive. A schedule runs no code during
    training and needs no torch.

    For a shape that the schedule cannot serve, raise :class:`megatron_run.errors.ScheduleError` and name the nearest
    one that it can. The user then sees a mistake in the configuration (exit code 2). Lists that are not a legal plan
    are a mistake of the plugin (exit code 3).

    A whole working plugin, all forwards and then all backwards::

        class AllForwardAllBackward(Schedule):
            def actions(self, spec):
                forwards = [Action("F", m, 0) for m in range(spec.microbatches)]
                backwards = [Action("B", m, 0) for m in range(spec.microbatches)]
                return [forwards + backwards for _ in range(spec.stages)]

        @hookimpl
        def megatron_run_plugin_info():
            return PluginInfo("schedule", "mine", provides=frozenset({"parallel.pipeline"}))

        @hookimpl
        def megatron_run_create_schedule(options):
            return AllForwardAllBackward()
    """

    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        """The place of each layer, in model order; the first place has the embedding, the last has the loss.

        The default is the looped layout of Megatron-LM. The stage and chunk of a place must follow from
        ``spec.stages`` and ``spec.chunks`` alone. The layers of a place may also depend on ``spec.layers`` and on the
        user's ``spec.counts``, and may be empty. Nothing depends on the number of microbatches.
        """
        return looped_layout(spec)

    @abstractmethod
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        """One list of actions per stage, in the order in which the stage runs them.

        For each (microbatch, chunk) of the stage: ``F``, then either ``B``, or ``I`` and later ``W``. Optionally ``S``
        starts a chunk's gradient sync, and ``R`` recomputes a forward before its backward.
        """
