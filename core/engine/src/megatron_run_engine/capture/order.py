"""The order in which graphs are recorded and replayed, from a stage's action list; and the check that it is kept.

Graphs that share memory are right in one order alone: the memory of a forward is given to others once its backward was
recorded. Replayed in another order, nothing fails and gradients are wrong, so the order is checked before each replay.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_run.contracts.actions import Action
from megatron_run.errors import GraphCaptureError


class Pass(NamedTuple):
    """A forward (F) or backward (B) of ``chunk``, or the end of it: nothing of the pair is read afterwards.

    ``copy`` tells apart what is recorded more than once: the microbatch, or the slot where graphs are reused.
    """

    kind: Literal["F", "B", "end"]
    chunk: int
    copy: int


def passes(actions: Sequence[Action], chunks: int) -> tuple[Pass, ...]:
    """What ``actions`` make of each pair of microbatch and chunk, in their order.

    I is the whole backward, since weight gradients are captured with it; but what eager layers keep for W still reads
    what the graphs around them gave out, so such a pair ends at its W. Raises :class:`GraphCaptureError` with the index
    of the action where the list is no order in which anything could run.
    """
    found: list[Pass] = []
    forwards, backwards = set[tuple[int, int]](), set[tuple[int, int]]()
    split = {(action.microbatch, action.chunk) for action in actions if action.op == "W"}
    for index, action in enumerate(actions):
        op, microbatch, chunk = action
        pair = (microbatch, chunk)
        _check(index, action, chunks, pair in forwards, pair in backwards)
        if op == "F":
            forwards.add(pair)
            found.append(Pass("F", chunk, microbatch))
        elif op in "BI":
            backwards.add(pair)
            found.append(Pass("B", chunk, microbatch))
        if op == "W" or (op in "BI" and pair not in split):
            found.append(Pass("end", chunk, microbatch))
    _check_whole(actions, forwards, backwards)
    return tuple(found)


def _check(index: int, action: Action, chunks: int, forward: bool, backward: bool) -> None:
    """Refuse an action of a chunk that is not there, twice the same, or before what it needs."""
    fault = ""
    if not 0 <= action.chunk < chunks:
        fault = f"there are {chunks} chunks, from 0"
    elif action.op == "R":
        fault = "a recomputed forward is not captured"
    elif action.op == "F" and forward:
        fault = "this forward was there before"
    elif action.op in "BI" and not forward:
        fault = "this backward comes before its forward"
    elif action.op in "BI" and backward:
        fault = "this backward was there before"
    elif action.op == "W" and not backward:
        fault = "this weight gradient comes before its I"
    if fault:
        raise GraphCaptureError(f"action {index}, {action}, cannot be captured", why=fault)


def _check_whole(actions: Sequence[Action], forwards: set[tuple[int, int]], backwards: set[tuple[int, int]]) -> None:
    if forwards != backwards:
        microbatch, chunk = min(forwards - backwards)
        index = actions.index(Action("F", microbatch, chunk))
        raise GraphCaptureError(
            f"action {index}, F{microbatch}.{chunk}, cannot be captured", why="its backward is missing"
        )


class OrderGuard:
    """Sees that replays come in the one order in which they were recorded, step after step.

    ``events`` are what is replayed in a step; ``show`` says in an error what one is.
    """

    def __init__(self, events: Iterable[Hashable]) -> None:
        self._events = tuple(events)
        self._next = 0
        self._step: int | None = None
        self._left_out: set[Hashable] = set()

    def leave_out(self, events: Iterable[Hashable], step: int) -> None:
        """These are not replayed in ``step``: what they belong to runs eagerly."""
        self._enter(step)
        self._left_out.update(events)

    def check(self, event: Hashable, step: int) -> None:
        """Raise :class:`GraphCaptureError` unless ``event`` is the next one of ``step``; then await the one after."""
        self._enter(step)
        self._skip()
        if not self._events or self._events[self._next] != event:
            raise GraphCaptureError(
                f"{event} was about to be replayed out of order",
                why=f"recorded next was {self._ahead()}; in another order graphs overwrite each other's memory",
                fix="run the step that was captured, or choose --plugin graph-capture=none",
            )
        self._next += 1

    def _enter(self, step: int) -> None:
        """Begin ``step`` unless it is under way. A run that goes back repeats the number of one that is done."""
        self._skip()
        done = self._next == len(self._events)
        if step == self._step and not done:
            return
        if self._step is not None and not done:
            raise GraphCaptureError(
                f"step {step} begins before step {self._step} was replayed to its end",
                why=f"recorded next was {self._ahead()}",
            )
        self._next, self._step = 0, step
        self._left_out.clear()

    def _skip(self) -> None:
        while self._next < len(self._events) and self._events[self._next] in self._left_out:
            self._next += 1

    def _ahead(self) -> str:
        return str(self._events[self._next]) if self._next < len(self._events) else "the end of the step"


#: (chunk, copy)
Key = tuple[int, int]


@dataclass(frozen=True)
class Slots:
    """``of`` maps a pair of chunk and microbatch to its slot, and ``count`` is their number."""

    of: Mapping[Key, int]
    count: int


def shared_slots(order: Iterable[Pass]) -> Slots:
    """Slots that all chunks share, for what does not bind a chunk's weights: as many as pairs are in flight at most."""
    taken: dict[Key, int] = {}
    free, count = deque[int](), 0
    for kind, chunk, copy in order:
        if kind == "F":
            if not free:
                free.append(count)
                count += 1
            taken[chunk, copy] = free.popleft()
        elif kind == "end":
            free.append(taken[chunk, copy])
    return Slots(taken, count)


def slots_by_chunk(order: Iterable[Pass], chunks: int) -> tuple[Slots, ...]:
    """Slots of each chunk alone, for graphs, which bind its weights: as many as it has in flight at most."""
    of_chunk: dict[int, list[Pass]] = defaultdict(list)
    for each in order:
        of_chunk[each.chunk].append(each)
    return tuple(shared_slots(of_chunk[chunk]) for chunk in range(chunks))
