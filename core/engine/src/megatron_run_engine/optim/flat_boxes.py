"""From a range of a flat tensor to boxes of it: what a share of a buffer holds of logical tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_run.contracts import Part


class FlatBox(NamedTuple):
    """A box of a tensor: ``starts`` and ``sizes`` per dimension; its values lie at ``flat`` of the flattened tensor."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: range


class PartBox(NamedTuple):
    """A box of the logical tensor ``part.name``, whose values lie at ``flat`` of the flattened parameter."""

    part: Part
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: range


def part_boxes(shape: tuple[int, ...], parts: Sequence[Part], flat: range) -> Iterator[PartBox]:
    """The boxes of logical tensors in the values ``flat`` of a parameter of ``shape`` that holds ``parts``.

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

    A box is whole in every dimension but the first in which it is cut, so that its values are contiguous: the end of
    a row, rows, the beginning of a row; and so on in each dimension.
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
