"""Ranges of a parameter's values: in a flat buffer, in one rank's share of it, and in the parameter.

These are the three ranges of a distributed optimizer on contiguous buffers (Rajbhandari et al. 2020, ZeRO-1). A share
may end in the middle of a parameter, so a parameter may straddle ranks. Pure arithmetic.
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

    ``in_bucket`` counts from the start of the buffer, ``local`` from the start of the share, ``param`` from the start
    of the parameter.
    """

    in_bucket: range
    local: range
    param: range


def param_range(start: int, length: int, share: range) -> ParamRange | None:
    """The values in ``share`` of a parameter at ``start`` of the buffer; None if it has none there."""
    in_bucket = range(max(start, share.start), min(start + length, share.stop))
    return ParamRange(in_bucket, _from(share.start, in_bucket), _from(start, in_bucket)) if in_bucket else None


def param_ranges(
    starts: Mapping[Key, int], lengths: Mapping[Key, int], share: range
) -> Iterator[tuple[Key, ParamRange]]:
    """Every parameter that has values in ``share``, in the order of the buffer."""
    for key, start in starts.items():
        found = param_range(start, lengths[key], share)
        if found is not None:
            yield key, found


def _from(origin: int, in_bucket: range) -> range:
    return range(in_bucket.start - origin, in_bucket.stop - origin)


class FlatBox(NamedTuple):
    """A box of a tensor: ``starts`` and ``sizes`` per dimension, and the range ``flat`` in the flattened tensor."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: range


class PartBox(NamedTuple):
    """A box of the logical tensor ``part.name``, whose values are the range ``flat`` of the flattened parameter."""

    part: Part
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: range


def part_boxes(shape: tuple[int, ...], parts: Sequence[Part], flat: range) -> Iterator[PartBox]:
    """The boxes of logical tensors in the values ``flat`` of a parameter of ``shape`` that holds ``parts``.

    Padding is excluded.
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

    Each box is whole in every dimension after the first one in which it is cut, so its values are contiguous. A range
    of a matrix, for example, becomes the end of a row, whole rows, and the beginning of a row.
    """
    if not flat:
        return
    if len(shape) < 2:
        yield FlatBox((flat.start,) * len(shape), (len(flat),) * len(shape), flat)
        return
    row, inner = prod(shape[1:]), shape[1:]
    first, last = -(-flat.start // row), flat.stop // row  # whole rows are first..last-1
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
