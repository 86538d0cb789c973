"""The phases of a stage's step, as ``schedule show`` counts and draws them: warm-up, steady, cool-down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_run.contracts.actions import Action


class Phases(NamedTuple):
    """Numbers of actions in the warm-up, steady and cool-down phases of a stage's list; any may be 0.

    Warm-up ends before the first backward; cool-down begins after the last forward.
    """

    warmup: int
    steady: int
    cooldown: int


def phases(actions: Sequence[Action]) -> Phases:
    """The phases of one stage's list; a list without backwards is all warm-up."""
    first_backward = next((index for index, action in enumerate(actions) if action.op in "BI"), len(actions))
    after_forward = next((len(actions) - i for i, action in enumerate(reversed(actions)) if action.op == "F"), 0)
    after_forward = max(first_backward, after_forward)
    return Phases(first_backward, after_forward - first_backward, len(actions) - after_forward)


def leading_forwards(actions: Sequence[Action]) -> int:
    """Number of forwards before the first backward."""
    return sum(action.op == "F" for action in actions[: phases(actions).warmup])
