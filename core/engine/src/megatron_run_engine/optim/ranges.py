"""Where the values of a parameter lie: in a flat buffer, in one rank's share of it, and in the parameter.

The three ranges of the distributed optimizer (Rajbhandari et al. 2020, ZeRO-1, on contiguous buffers). A share is cut
anywhere, so a parameter may straddle ranks. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")


class ParamRange(NamedTuple):
    """One parameter's values in one share, counted three ways; all three ranges have one length.

    ``world`` counts from the start of the buffer, ``local`` from that of the share, ``param`` from the parameter's.
    """

    world: range
    local: range
    param: range


def param_range(start: int, length: int, share: range) -> ParamRange | None:
    """The values in ``share`` of a parameter that lies at ``start`` of the buffer; None when it has none there."""
    world = range(max(start, share.start), min(start + length, share.stop))
    return ParamRange(world, _from(share.start, world), _from(start, world)) if world else None


def param_ranges(
    starts: Mapping[Key, int], lengths: Mapping[Key, int], share: range
) -> Iterator[tuple[Key, ParamRange]]:
    """Every parameter with values in ``share``, in the order of the buffer."""
    for key, start in starts.items():
        found = param_range(start, lengths[key], share)
        if found is not None:
            yield key, found


def _from(origin: int, world: range) -> range:
    return range(world.start - origin, world.stop - origin)
