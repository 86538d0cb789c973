"""From a range of a flat tensor to boxes of it: what a share of a buffer holds of a logical tensor."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor: ``starts`` and ``sizes`` per dimension; its values lie at ``flat`` of the flattened tensor."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: range


def boxes(shape: tuple[int, ...], flat: range) -> Iterator[Box]:
    """Cut the values ``flat`` of a contiguous tensor of ``shape`` into boxes, in order: at most ``2 * ndim - 1``.

    A box is whole in every dimension but the first in which it is cut, so that its values are contiguous: the end of
    a row, rows, the beginning of a row; and so on in each dimension.
    """
    if not flat:
        return
    if len(shape) < 2:
        yield Box((flat.start,) * len(shape), (len(flat),) * len(shape), flat)
        return
    row, inner = prod(shape[1:]), shape[1:]
    first, last = -(-flat.start // row), flat.stop // row  # the rows that are whole are first..last-1
    if first > last:  # within one row
        yield from _in_row(last, inner, flat, row)
        return
    yield from _in_row(first - 1, inner, range(flat.start, first * row), row)
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner), range(first * row, last * row))
    yield from _in_row(last, inner, range(last * row, flat.stop), row)


def _in_row(index: int, inner: tuple[int, ...], flat: range, row: int) -> Iterator[Box]:
    offset = index * row
    for box in boxes(inner, range(flat.start - offset, flat.stop - offset)):
        values = range(box.flat.start + offset, box.flat.stop + offset)
        yield Box((index, *box.starts), (1, *box.sizes), values)
