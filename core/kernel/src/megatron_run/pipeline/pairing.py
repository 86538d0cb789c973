"""Proves that every send meets its receive, for all channels of a plan at once. Pure Python, no torch.

The layout alone determines which stage produces a message and which one consumes it, so a message determines its
channel. Two properties of a plan's global order are proven; lowering relies on nothing else:

- The order contains each stage's list completely and in the order of that list. So the order of two sends of a stage in
  it is the order in which the stage sends.
- Every message is produced once and then consumed once, or neither. So on each directed channel the needed receives are
  exactly the sends, and receives that are posted in the order of the sends, each no later than its use, meet them one
  by one.

Lowering checks that a stage's program does post them so (:mod:`megatron_run.pipeline.lower`).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_run.contracts.actions import Action, Place
from megatron_run.errors import ScheduleError

#: The state of a message: not produced yet, produced, consumed.
_UNSENT, _SENT, _RECEIVED = range(3)

#: operation -> chunk -> (message it consumes, message it produces), both for microbatch 0; None where there is none.
_Messages = dict[str, list[tuple[int | None, int | None]]]


def check_pairing(
    layout: Sequence[Place],
    microbatches: int,
    lists: Sequence[Sequence[Action]],
    order: Sequence[tuple[int, int]],
) -> None:
    """Raise :class:`ScheduleError` unless ``order``, (stage, index in its list) of each action, pairs all messages.

    Messages are integers for speed, since plans of half a million actions are common: the activation of microbatch
    ``m`` into position ``k`` is ``(2k)*M + m``, the gradient out of it ``(2k+1)*M + m``. Position 0 has neither.
    """
    messages = _messages(layout, microbatches, len(lists))
    state = bytearray(2 * len(layout) * microbatches)
    heads = [0] * len(lists)
    for stage, index in order:
        if index != heads[stage]:
            raise ScheduleError(f"the global order has action {index} of stage {stage} where {heads[stage]} comes next")
        heads[stage] = index + 1
        op, microbatch, chunk = lists[stage][index]
        if op not in "FBI":
            continue
        receives, sends = messages[stage][op][chunk]
        if receives is not None:
            if state[receives + microbatch] != _SENT:
                raise _misused(stage, index, lists, state[receives + microbatch])
            state[receives + microbatch] = _RECEIVED
        if sends is not None:
            if state[sends + microbatch] != _UNSENT:
                raise ScheduleError(f"{_action(stage, index, lists)} sends a message that was sent before")
            state[sends + microbatch] = _SENT
    if heads != [len(actions) for actions in lists]:
        raise ScheduleError(f"the global order has {len(order)} of {sum(map(len, lists))} actions")
    if state.count(_SENT):
        raise ScheduleError(f"{state.count(_SENT)} messages are sent and never received")


def _messages(layout: Sequence[Place], microbatches: int, stages: int) -> list[_Messages]:
    """The messages that each stage's actions consume and produce."""
    chunks = 1 + max(place.chunk for place in layout)
    table: list[_Messages] = [{op: [(None, None)] * chunks for op in "FBI"} for _ in range(stages)]
    for position, place in enumerate(layout):
        here, after = ((2 * each * microbatches) for each in (position, position + 1))
        into = here if position else None
        onward = after if position + 1 < len(layout) else None
        mine = table[place.stage]
        mine["F"][place.chunk] = into, onward
        for op in "BI":
            mine[op][place.chunk] = (
                None if onward is None else onward + microbatches,
                None if into is None else into + microbatches,
            )
    return table


def _misused(stage: int, index: int, lists: Sequence[Sequence[Action]], state: int) -> ScheduleError:
    """The error for an action whose message was consumed before, or is not produced yet."""
    why = "was received before" if state == _RECEIVED else "was not sent yet"
    return ScheduleError(f"{_action(stage, index, lists)} needs a message that {why}")


def _action(stage: int, index: int, lists: Sequence[Sequence[Action]]) -> str:
    return f"stage {stage}, action {index}: {lists[stage][index]}"
