"""A plan: verified action lists, and the properties derived from them. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_run.contracts.schedule import COSTS, Action, Place


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions of every stage in one step, proven legal.

    ``layout`` lists the places of the model in model order, so a place's index is its position. ``lists`` holds the
    actions of each stage in the order in which it runs them.

    ``ends`` holds, per stage, the time at which each action of its list ends, in units of one chunk's forward, if every
    operation takes its cost of ``costs`` and messages take no time.

    ``order`` lists every action as ``(stage, index in its list)``, sorted by these times, ties by stage. (If an
    operation for which another stage waits is free, the times of the default costs are used.) It is a linear extension
    of the action graph, and so an order in which all messages of all stages can be issued.

    ``peak_in_flight`` is, per stage, the largest number of (microbatch, chunk) pairs between the F that produces their
    activations (R, if the forward is recomputed) and the B or I that frees them. ``peak_pending_weights`` is the
    largest number between I and W: of these the inputs of layers, and the gradients of their outputs, are still held.
    ``peak_held`` is the largest number of both together, from F (or R) to B or W; it is ``peak_in_flight`` where no
    backward is split. All are 0 in a forward-only plan. A stage runs its list in order, so they are reached and never
    exceeded, however long actions and messages take. They count pairs, not bytes, and exclude tensors that were sent,
    or received and not used yet.

    ``ascending`` is true if each chunk accumulates its gradients in microbatch order, as sequential does. Only then are
    gradients promised to equal those of sequential bit for bit.
    """

    layout: tuple[Place, ...]
    stages: int
    chunks: int
    microbatches: int
    lists: tuple[tuple[Action, ...], ...]
    order: tuple[tuple[int, int], ...]
    peak_in_flight: tuple[int, ...]
    peak_pending_weights: tuple[int, ...]
    peak_held: tuple[int, ...]
    ascending: bool
    ends: tuple[tuple[float, ...], ...]
    costs: Mapping[str, float] = field(default_factory=lambda: dict(COSTS))


def positions(layout: Sequence[Place]) -> Mapping[tuple[int, int], int]:
    """The position, the index in model order, of each (stage, chunk)."""
    return {(place.stage, place.chunk): position for position, place in enumerate(layout)}


def activations(actions: Sequence[Action], freed_by: str = "BI") -> Iterator[int]:
    """Change of the activations in flight by each action: 1 if it produces activations, -1 if it frees them.

    A forward that is recomputed keeps no activations; its R produces them. With ``freed_by`` "BW" a pair counts until
    nothing of it is held.
    """
    recomputed = {action[1:] for action in actions if action.op == "R"}
    for action in actions:
        op = action.op
        if op == "F":
            yield 0 if recomputed and action[1:] in recomputed else 1
        else:
            yield 1 if op == "R" else -1 if op in freed_by else 0
