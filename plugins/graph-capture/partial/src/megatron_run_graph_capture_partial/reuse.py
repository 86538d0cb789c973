"""How often each region is recorded: once for each microbatch, or once for each that is in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_run_engine.capture import Pass, shared_slots, slots_by_chunk

#: (chunk, microbatch or copy)
Key = tuple[int, int]


class Reuse(NamedTuple):
    """What is recorded, and which microbatch replays what.

    ``recorded`` is the order of recording; ``copies`` maps a chunk and microbatch to the copy it replays, ``slots`` a
    chunk and copy to its slot of static inputs, of which there are ``slot_count``, and ``pools`` to the pool that holds
    its memory.
    """

    recorded: tuple[Pass, ...]
    copies: Mapping[Key, int]
    slots: Mapping[Key, int]
    slot_count: int
    pools: Mapping[Key, int]


def per_microbatch(order: Sequence[Pass]) -> Reuse:
    """Graphs of every microbatch, in one pool in the order of the run: memory for those in flight, many graphs."""
    slots = shared_slots(order)
    keys = slots.of.keys()
    return Reuse(tuple(order), {key: key[1] for key in keys}, slots.of, slots.count, dict.fromkeys(keys, 0))


def per_slot(order: Sequence[Pass], chunks: int) -> Reuse:
    """As few graphs as can be: a chunk's weights and a slot bind one each.

    A pool for each, since its graphs are replayed between those of any other: memory of one is never given to another.
    """
    by_chunk = slots_by_chunk(order, chunks)
    keys = [(chunk, slot) for chunk, slots in enumerate(by_chunk) for slot in range(slots.count)]
    recorded = tuple(Pass(kind, *key) for key in keys for kind in ("F", "B", "end"))
    copies = {key: slot for slots in by_chunk for key, slot in slots.of.items()}
    numbers = {key: number for number, key in enumerate(keys)}
    return Reuse(recorded, copies, numbers, len(keys), numbers)
