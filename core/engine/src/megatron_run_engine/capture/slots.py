"""Slots: how many copies must exist at once, and which microbatch uses which."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_run_engine.capture.order import Pass

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
