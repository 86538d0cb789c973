from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from megatron_run.contracts import Part
from megatron_run_engine.optim import boxes, part_boxes

SHAPES = [(7,), (1,), (4, 5), (1, 6), (6, 1), (3, 4, 5), (2, 1, 3), (2, 3, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_exactly_the_values_of_every_range(shape: tuple[int, ...]) -> None:
    """Compared with a picture: numbers in the tensor's order, cut out box by box."""
    picture = np.arange(np.prod(shape)).reshape(shape)
    for start in range(picture.size):
        for stop in range(start, picture.size + 1):
            found = list(boxes(shape, range(start, stop)))
            cut = [picture[tuple(map(slice, b.starts, np.add(b.starts, b.sizes)))] for b in found]
            assert [value for box in cut for value in box.flatten()] == list(range(start, stop))
            assert [list(box.flat) for box in found] == [list(box.flatten()) for box in cut]
            assert len(found) <= 2 * len(shape) - 1


def test_boxes_of_a_range_follow_each_other() -> None:
    found = list(boxes((4, 5), range(3, 18)))
    assert [(box.starts, box.sizes) for box in found] == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 3))]
    assert all(one.flat.stop == other.flat.start for one, other in pairwise(found))


def test_boxes_of_parts_lie_where_the_logical_tensors_have_them_and_leave_padding_out() -> None:
    """Compared with a picture of the parameter: what each value is in its logical tensor."""
    shape = (6, 2)
    parts = (Part("query", (8, 4), range(2), start=4, column=2), Part("key", (3, 2), range(3, 6)))  # row 2 is padding
    pictures = {part.name: np.full(part.shape, -1) for part in parts}
    for part in parts:
        rows = slice(part.start, part.start + len(part.local))
        columns = slice(part.column, part.column + shape[1])
        pictures[part.name][rows, columns] = np.arange(12).reshape(shape)[part.local.start : part.local.stop]
    for start in range(12):
        for stop in range(start, 13):
            found = list(part_boxes(shape, parts, range(start, stop)))
            cut = [pictures[b.part.name][tuple(map(slice, b.starts, np.add(b.starts, b.sizes)))] for b in found]
            assert [list(box.flat) for box in found] == [list(box.flatten()) for box in cut]
            assert [value for box in cut for value in box.flatten()] == [
                v for v in range(start, stop) if v not in (4, 5)
            ]
