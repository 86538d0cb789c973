"""The phases of a stage's step, as ``schedule show`` counts and draws them: warm-up, steady, cool-down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_run.contracts.actions import Action


class Phases(NamedTuple):
    """How many actions of a stage's list are warm-up, steady and cool-down, in this order; any may be 0.

    Warm-up is what comes before the first backward, cool-down what comes after the last forward.
    """

    warmup: int
    steady: int
    cooldown: int


def phases(actions: Sequence[Action]) -> Phases:
    """The phases of one stage's list; forwards alone are all warm-up."""
    first_backward = next((index for index, action in enumerate(actions) if action.op in "BI"), len(actions))
    after_forward = next((len(actions) - i for i, action in enumerate(reversed(actions)) if action.op == "F"), 0)
    after_forward = max(first_backward, after_forward)
    return Phases(first_backward, after_forward - first_backward, len(actions) - after_forward)


def leading_forwards(actions: Sequence[Action]) -> int:
    """The forwards before the first backward."""
    return sum(action.op == "F" for action in actions[: phases(actions).warmup])
