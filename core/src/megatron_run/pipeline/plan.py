"""A plan: action lists that were proven to run, and what follows from them. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_run.actions import Action, Place


@dataclass(frozen=True, slots=True)
class Plan:
    """What every stage does in one step, proven free of faults.

    ``layout`` places the model in model order, so a place's index is its position; ``lists`` holds the actions of each
    stage in the order it runs them.

    ``order`` lists every action as ``(stage, index in its list)`` by simulated completion time, ties by stage. It is a
    linear extension of the action graph, hence one order in which all messages of all stages can be issued.

    ``peak_in_flight`` is, per stage, the most (microbatch, chunk) pairs at once between the F that makes their
    activations (R, where the forward is recomputed) and the B or I that frees them; ``peak_pending_weights`` the most
    between I and W. A forward-only plan holds nothing: both are 0.

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


def positions(layout: Sequence[Place]) -> Mapping[tuple[int, int], int]:
    """(stage, chunk) -> position, the index in model order."""
    return {(place.stage, place.chunk): position for position, place in enumerate(layout)}
