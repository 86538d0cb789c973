"""Boxes against sets of indices: what two share, what is missing, what is held twice."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from megatron_run_engine.checkpoint.boxes import Box, box_fault, cover_fault
from tests.support.saved_steps import cut

Index = tuple[int, ...]


def indices(box: Box) -> set[Index]:
    return set(product(*(range(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))))


def random_box(draw: random.Random, dimensions: int) -> Box:
    return Box(
        tuple(draw.randint(0, 3) for _ in range(dimensions)), tuple(draw.randint(1, 4) for _ in range(dimensions))
    )


@pytest.mark.parametrize("dimensions", range(4))
def test_what_two_boxes_share_is_the_intersection_of_their_indices(dimensions: int) -> None:
    draw = random.Random(dimensions)
    for _ in range(200):
        first, second = random_box(draw, dimensions), random_box(draw, dimensions)
        common = first.common(second)
        assert (indices(common) if common else set()) == indices(first) & indices(second)
        assert first.volume == len(indices(first))
        if common:
            whole = np.zeros(first.sizes)
            whole[common.within(first)] = 1
            assert whole.sum() == common.volume


@pytest.mark.parametrize("seed", range(60))
def test_a_cover_is_what_holds_each_index_once(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 3)))
    boxes = cut(draw, Box((0,) * len(shape), shape), 6)
    draw.shuffle(boxes)
    assert not cover_fault(shape, boxes)
    if len(boxes) > 1:
        assert "are in no piece" in cover_fault(shape, boxes[1:])
        assert "the same values" in cover_fault(shape, [boxes[0], *boxes])
    for wrong in range(20):
        some = [random_box(draw, len(shape)) for _ in range(wrong % 4)]
        counted = [index for box in some for index in indices(box)]
        whole = sorted(product(*map(range, shape)))
        assert bool(cover_fault(shape, some)) == (sorted(counted) != whole)


@pytest.mark.parametrize(
    ("box", "why"),
    [
        (Box((0,), (2,)), "do not fit the shape [4, 4]"),
        (Box((0, 0), (2,)), "do not fit the shape [4, 4]"),
        (Box((0, -1), (2, 2)), "not inside"),
        (Box((0, 3), (2, 2)), "not inside"),
        (Box((0, 0), (2, 0)), "empty"),
    ],
)
def test_what_is_no_box_of_a_tensor_is_said(box: Box, why: str) -> None:
    assert why in box_fault((4, 4), box)
    assert why in cover_fault((4, 4), [box])


def test_a_number_without_dimensions_is_held_once() -> None:
    one = Box((), ())
    assert not cover_fault((), [one])
    assert "hold the same values" in cover_fault((), [one, one])
    assert "1 of its 1 values are in no piece" in cover_fault((), [])
