"""Index arithmetic: where a parameter's values lie in a flat buffer, in one rank's share of it, and in the parameter.

These are the three ranges of the distributed optimizer (Rajbhandari et al. 2020, ZeRO-1, on contiguous buffers). Shares
are cut anywhere, so a parameter may straddle ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from megatron_run.contracts import Part


Key = TypeVar("Key")


class ParamRange(NamedTuple):
    """One parameter's values in one share, as three ranges of equal length.

    ``world`` counts from the start of the buffer, ``local`` from that of the share, ``param`` from the parameter's.
    """

    world: range
    local: range
    param: range


def param_range(start: int, length: int, share: range) -> ParamRange | None:
    """Return the values in ``share`` of a parameter at ``start`` of the buffer, or None if it has none there."""
    world = range(max(start, share.start), min(start + length, share.stop))
    return ParamRange(world, _from(share.start, world), _from(start, world)) if world else None


def param_ranges(
    starts: Mapping[Key, int], lengths: Mapping[Key, int], share: range
) -> Iterator[tuple[Key, ParamRange]]:
    """Yield every parameter with values in ``share``, in the order of the buffer."""
    for key, start in starts.items():
        found = param_range(start, lengths[key], share)
        if found is not None:
            yield key, found


def _from(origin: int, world: range) -> range:
    return range(world.start - origin, world.stop - origin)


class FlatBox(NamedTuple):
    """A box of a tensor, with ``starts`` and ``sizes`` per dimension, at ``flat`` of the flattened tensor."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: range


class PartBox(NamedTuple):
    """A box of the logical tensor ``part.name``, at ``flat`` of the flattened parameter."""

    part: Part
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: range


def part_boxes(shape: tuple[int, ...], parts: Sequence[Part], flat: range) -> Iterator[PartBox]:
    """Yield the boxes of logical tensors in the values ``flat`` of a parameter of ``shape`` with ``parts``.

    Padding is left out.
    """
    columns = shape[1:]
    row = prod(columns)
    for part in parts:
        first, end = part.local.start * row, part.local.stop * row
        inside = range(max(flat.start, first) - first, min(flat.stop, end) - first)
        origin = (part.start, part.column, *(0 for _ in columns[1:]))
        for box in boxes((len(part.local), *columns), inside):
            starts = tuple(start + offset for start, offset in zip(box.starts, origin, strict=False))
            yield PartBox(part, starts, box.sizes, range(box.flat.start + first, box.flat.stop + first))


def boxes(shape: tuple[int, ...], flat: range) -> Iterator[FlatBox]:
    """Cut the values ``flat`` of a contiguous tensor of ``shape`` into boxes, in order: at most ``2 * ndim - 1``.

    A box is cut in one dimension at most and whole in all later ones, so that its values are contiguous: the end of a
    row, whole rows, the beginning of a row; and so on within each dimension.
    """
    if not flat:
        return
    if len(shape) < 2:
        yield FlatBox((flat.start,) * len(shape), (len(flat),) * len(shape), flat)
        return
    row, inner = prod(shape[1:]), shape[1:]
    first, last = -(-flat.start // row), flat.stop // row  # the rows that are whole are first..last-1
    if first > last:  # within one row
        yield from _in_row(last, inner, flat, row)
        return
    yield from _in_row(first - 1, inner, range(flat.start, first * row), row)
    if first < last:
        yield FlatBox((first, *(0 for _ in inner)), (last - first, *inner), range(first * row, last * row))
    yield from _in_row(last, inner, range(last * row, flat.stop), row)


def _in_row(index: int, inner: tuple[int, ...], flat: range, row: int) -> Iterator[FlatBox]:
    offset = index * row
    for box in boxes(inner, range(flat.start - offset, flat.stop - offset)):
        values = range(box.flat.start + offset, box.flat.stop + offset)
        yield FlatBox((index, *box.starts), (1, *box.sizes), values)
