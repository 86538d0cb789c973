"""How often each region is recorded: per microbatch of a round, or per microbatch in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_run_engine.capture import Pass, recordings, shared_slots, slots_by_chunk

#: (chunk, microbatch or copy)
Key = tuple[int, int]


class Reuse(NamedTuple):
    """Which copies of a region are recorded, and which microbatch replays which copy.

    ``recorded`` is the order of recording. ``copies`` maps (chunk, microbatch) to the copy that it replays; ``slots``
    maps (chunk, copy) to one of ``slot_count`` slots of static inputs, and ``pools`` to the pool that holds its memory.
    """

    recorded: tuple[Pass, ...]
    copies: Mapping[Key, int]
    slots: Mapping[Key, int]
    slot_count: int
    pools: Mapping[Key, int]


def per_microbatch(order: Sequence[Pass], chunks: int) -> Reuse:
    """Graphs of every microbatch of a round, in one pool, in the order of the run: many graphs, little memory.

    A round ends when nothing is in flight; rounds that are alike share their graphs
    (:func:`megatron_run_engine.capture.recordings`).
    """
    recorded, copies = recordings(order, chunks)
    slots = shared_slots(recorded)
    return Reuse(recorded, copies, slots.of, slots.count, dict.fromkeys(slots.of, 0))


def per_slot(order: Sequence[Pass], chunks: int) -> Reuse:
    """The fewest possible graphs: one set per chunk (whose weights are fixed) and slot.

    Each set has its own pool, since its graphs replay between those of any other set: no order of reuse is safe.
    """
    by_chunk = slots_by_chunk(order, chunks)
    keys = [(chunk, slot) for chunk, slots in enumerate(by_chunk) for slot in range(slots.count)]
    recorded = tuple(Pass(kind, *key) for key in keys for kind in ("F", "B", "end"))
    copies = {key: slot for slots in by_chunk for key, slot in slots.of.items()}
    numbers = {key: number for number, key in enumerate(keys)}
    return Reuse(recorded, copies, numbers, len(keys), numbers)
