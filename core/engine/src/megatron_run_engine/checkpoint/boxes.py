"""Boxes of logical tensors: the start and size, in each dimension, of the values that a piece holds."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """The values from ``starts`` up to ``starts + sizes``. A tensor without dimensions is the box ``((), ())``."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def stops(self) -> tuple[int, ...]:
        """The first index after the box in each dimension."""
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))

    @property
    def volume(self) -> int:
        """The number of values."""
        return prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """Return the intersection with ``other``, or None if it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        sizes = tuple(stop - start for start, stop in zip(starts, map(min, self.stops, other.stops), strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds the larger box ``outer``."""
        firsts = [start - first for start, first in zip(self.starts, outer.starts, strict=True)]
        return tuple(slice(first, first + size) for first, size in zip(firsts, self.sizes, strict=True))

    def __str__(self) -> str:
        return f"[{','.join(f'{start}:{stop}' for start, stop in zip(self.starts, self.stops, strict=True))}]"


def box_fault(shape: Sequence[int], box: Box) -> str:
    """Return why ``box`` is no box of a tensor of ``shape``, or an empty text if it is one."""
    if not len(box.starts) == len(box.sizes) == len(shape):
        return f"starts {list(box.starts)} and sizes {list(box.sizes)} do not fit the shape {list(shape)}"
    inside = all(
        start >= 0 and size > 0 and start + size <= length
        for start, size, length in zip(box.starts, box.sizes, shape, strict=True)
    )
    return "" if inside else f"{box} is empty or not inside the shape {list(shape)}"


def cover_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return why ``boxes`` do not hold each value of a tensor of ``shape`` exactly once, empty if they do."""
    # Boxes inside the shape that do not overlap cover it if and only if their volumes add up to its volume.
    fault = next(filter(None, (box_fault(shape, box) for box in boxes)), "") or _overlap(boxes)
    if fault:
        return fault
    held, wanted = sum(box.volume for box in boxes), prod(shape)
    return "" if held == wanted else f"{wanted - held} of its {wanted} values are in no piece"


def _overlap(boxes: Sequence[Box]) -> str:
    """Name the first two boxes that share values, or return an empty text."""
    near: list[Box] = []  # a sweep along the first dimension: boxes that may still overlap the next one
    for box in sorted(boxes):
        near = [each for each in near if each.stops[:1] > box.starts[:1] or not box.starts]
        twin = next((each for each in near if each.common(box)), None)
        if twin is not None:
            return f"{twin} and {box} hold the same values"
        near.append(box)
    return ""
