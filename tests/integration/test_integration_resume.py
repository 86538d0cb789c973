"""What one shape of ranks saved another loads: every value of weights and moments bit for bit, and the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.integration.reshaping import RANKS, SHAPES, SPLIT_SHAPES, Found, Shape, check_bits, check_samples, reshape
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.training import kept_groups

pytestmark = pytest.mark.multiproc

#: Three of them, and so six pairs: data alone, and a pipeline with data and with tensor ranks.
FEW = tuple(shape for shape in SHAPES if shape != (2, 1, 2))
#: Without ranks that split samples, and with them and tensor ranks.
FEW_SPLIT = (SPLIT_SHAPES[0], SPLIT_SHAPES[-1])
each_case = pytest.mark.parametrize(
    ("optimizer", "shapes"),
    [
        pytest.param("adamw", SHAPES, id="adamw", marks=pytest.mark.nightly),
        pytest.param("zero1", SHAPES, id="zero1", marks=pytest.mark.nightly),
        pytest.param("adamw", SPLIT_SHAPES, id="adamw, split samples", marks=pytest.mark.nightly),
        pytest.param("zero1", SPLIT_SHAPES, id="zero1, split samples", marks=pytest.mark.nightly),
        pytest.param("zero3,whole_below=0", SHAPES, id="zero3", marks=pytest.mark.nightly),
        pytest.param("zero1", FEW, id="zero1, few", marks=pytest.mark.nightly),
        pytest.param("zero1", FEW_SPLIT, id="zero1, few split samples"),
        pytest.param("zero3,whole_below=0", FEW, id="zero3, few"),
    ],
)


def reshape_all(rank: int, world: int, root: str, optimizer: str, shapes: Sequence[Shape]) -> Found:
    """All pairs of ``shapes``."""
    with found_once(), kept_groups():
        return reshape(rank, world, Path(root), optimizer, shapes)


@cache
def found(root: Path, optimizer: str, shapes: tuple[Shape, ...]) -> list[Found]:
    """By rank, of the same four processes; the runs are in ``root``."""
    return run_ranks(reshape_all, RANKS, str(root), optimizer, shapes, timeout=280)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@each_case
def test_every_shape_loads_the_bits_that_every_other_saved_and_goes_on_alike(
    optimizer: str, shapes: tuple[Shape, ...], root: Path
) -> None:
    place = root / f"{optimizer} {shapes}"
    check_bits(place, found(place, optimizer, shapes), shapes)


@each_case
def test_the_next_thousand_samples_are_those_that_the_source_would_have_taken(
    optimizer: str, shapes: tuple[Shape, ...], root: Path
) -> None:
    check_samples(found(root / f"{optimizer} {shapes}", optimizer, shapes))
