"""The order in which graphs are recorded and replayed, from a stage's action list, and the check of that order.

Graphs that share memory are correct in one order only: the memory of a forward is reused once its backward has been
recorded. A replay in another order raises no error and gives wrong gradients, so the order is checked before each
replay.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_run.contracts.schedule import Action
from megatron_run.errors import GraphCaptureError


class Pass(NamedTuple):
    """A forward (F) or backward (B) of ``chunk``, or the end of the pair, after which nothing of it is read.

    ``copy`` tells recordings of the same chunk apart: it is the microbatch, or the slot if graphs are reused.
    """

    kind: Literal["F", "B", "end"]
    chunk: int
    copy: int


def passes(actions: Sequence[Action], chunks: int) -> tuple[Pass, ...]:
    """Return the passes of each pair of microbatch and chunk, in the order of ``actions``.

    I counts as the whole backward, since weight gradients are captured with it. But the weight gradients that eager
    layers defer to W still read outputs of the graphs around them, so such a pair ends at its W. Raises
    :class:`GraphCaptureError` with the index of an action that cannot run at its place.
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
    """Raise :class:`GraphCaptureError` for an unknown chunk, a repeated action, or one before what it needs."""
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


#: (chunk, copy)
Key = tuple[int, int]


class Recordings(NamedTuple):
    """``passes`` are those to record, in order; ``copies`` maps (chunk, microbatch) to the copy that it replays."""

    passes: tuple[Pass, ...]
    copies: Mapping[Key, int]


def recordings(order: Sequence[Pass], chunks: int) -> Recordings:
    """Return the passes of a step that need a recording of their own.

    A round is a part of ``order`` that begins and ends with nothing in flight, every chunk having run equally often.
    No memory lives from one round to the next, so rounds that are alike but for their microbatches replay the graphs
    of the first: without a pipeline each microbatch is a round, and one recording serves them all.
    """
    made: dict[Hashable, tuple[int, ...]] = {}
    found: list[Pass] = []
    copies: dict[Key, int] = {}
    for passes_of_round in _rounds(order, chunks):
        microbatches = tuple(dict.fromkeys(each.copy for each in passes_of_round))
        number = {microbatch: index for index, microbatch in enumerate(microbatches)}
        alike = tuple((kind, chunk, number[microbatch]) for kind, chunk, microbatch in passes_of_round)
        if alike not in made:
            made[alike] = microbatches
            found += passes_of_round
        first = made[alike]
        copies.update(((chunk, microbatch), first[number[microbatch]]) for _, chunk, microbatch in passes_of_round)
    return Recordings(tuple(found), copies)


def _rounds(order: Iterable[Pass], chunks: int) -> Iterator[list[Pass]]:
    of_round: list[Pass] = []
    in_flight, forwards = 0, [0] * chunks
    for each in order:
        of_round.append(each)
        in_flight += (each.kind == "F") - (each.kind == "end")
        forwards[each.chunk] += each.kind == "F"
        if not in_flight and len({*forwards}) == 1:
            yield of_round
            of_round = []
    if of_round:
        yield of_round


class OrderGuard:
    """Checks that the replays of every step come in the order in which they were recorded.

    ``events`` are the replays of a step. Their ``str`` appears in errors.
    """

    def __init__(self, events: Iterable[Hashable]) -> None:
        self._events = tuple(events)
        self._next = 0
        self._step: int | None = None
        self._left_out: set[Hashable] = set()

    def leave_out(self, events: Iterable[Hashable], step: int) -> None:
        """Expect no replay of ``events`` in ``step``: their chunk runs eagerly."""
        self._enter(step)
        self._left_out.update(events)

    def check(self, event: Hashable, step: int) -> None:
        """Raise :class:`GraphCaptureError` unless ``event`` is the next one of ``step``. Advance past it."""
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
        """Begin ``step`` unless it is in progress. A rewound run repeats the number of a finished step."""
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


@dataclass(frozen=True)
class Slots:
    """``of`` maps a pair of chunk and microbatch to its slot, and ``count`` is their number."""

    of: Mapping[Key, int]
    count: int


def shared_slots(order: Iterable[Pass]) -> Slots:
    """Return slots shared by all chunks, for memory without weights: as many as pairs are ever in flight."""
    taken: dict[Key, int] = {}
    free, count = deque[int](), 0
    for kind, chunk, copy in order:
        if kind == "F":
            if not free:
                free.append(count)
                count += 1
            taken[chunk, copy] = free.popleft()  # first in, first out: a slot rests as long as possible
        elif kind == "end":
            free.append(taken[chunk, copy])
    return Slots(taken, count)


def slots_by_chunk(order: Iterable[Pass], chunks: int) -> tuple[Slots, ...]:
    """Return slots per chunk, for graphs, which are bound to its weights: as many as it ever has in flight."""
    of_chunk: dict[int, list[Pass]] = defaultdict(list)
    for each in order:
        of_chunk[each.chunk].append(each)
    return tuple(shared_slots(of_chunk[chunk]) for chunk in range(chunks))
