"""A plan: action lists that were proven to run, and what follows from them. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_run.contracts.actions import COSTS, Action, Place


@dataclass(frozen=True, slots=True)
class Plan:
    """What every stage does in one step, proven free of faults.

    ``layout`` places the model in model order, so a place's index is its position; ``lists`` holds the actions of each
    stage in the order it runs them.

    ``ends`` holds, per stage, the time at which each action of its list is done when every operation takes its cost of
    ``costs`` and messages take none, in units of one chunk's forward.

    ``order`` lists every action as ``(stage, index in its list)`` by these times, ties by stage (by the default costs
    where an operation for which another stage waits is free). It is a linear extension of the action graph, hence one
    order in which all messages of all stages can be issued.

    ``peak_in_flight`` is, per stage, the most (microbatch, chunk) pairs at once between the F that makes their
    activations (R, where the forward is recomputed) and the B or I that frees them; ``peak_pending_weights`` the most
    between I and W. A forward-only plan holds nothing: both are 0. A stage runs its list in order, so both are reached
    and never exceeded however long its actions and messages take. They count pairs, not bytes; tensors that were sent
    or received and wait for a neighbour are not among them.

    ``ascending`` says that each chunk accumulates its gradients in microbatch order, as sequential does: only then are
    gradients promised to be equal bit for bit.
    """

    layout: tuple[Place, ...]
    stages: int
    chunks: int
    microbatches: int
    lists: tuple[tuple[Action, ...], ...]
    order: tuple[tuple[int, int], ...]
    peak_in_flight: tuple[int, ...]
    peak_pending_weights: tuple[int, ...]
    ascending: bool
    ends: tuple[tuple[float, ...], ...]
    costs: Mapping[str, float] = field(default_factory=lambda: dict(COSTS))


def positions(layout: Sequence[Place]) -> Mapping[tuple[int, int], int]:
    """(stage, chunk) -> position, the index in model order."""
    return {(place.stage, place.chunk): position for position, place in enumerate(layout)}


def activations(actions: Sequence[Action]) -> Iterator[int]:
    """What each action adds to the activations in flight: 1 where it makes some, -1 where it frees them.

    A forward that is recomputed keeps none: its R makes them.
    """
    recomputed = {action[1:] for action in actions if action.op == "R"}
    for action in actions:
        op = action.op
        if op == "F":
            yield 0 if recomputed and action[1:] in recomputed else 1
        else:
            yield 1 if op == "R" else -1 if op in "BI" else 0
