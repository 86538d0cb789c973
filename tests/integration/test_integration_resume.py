"""What one shape of ranks saved another loads: every value of weights and moments bit for bit, and the run goes on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.integration.reshaping import SHAPES, Found, check_bits, check_samples, reshape
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.training import kept_groups

pytestmark = pytest.mark.multiproc

each_optimizer = pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.nightly), "zero1"])


def reshape_all(rank: int, world: int, root: str, optimizer: str) -> Found:
    """All twelve pairs of shapes."""
    with found_once(), kept_groups():
        return reshape(rank, world, Path(root), optimizer, SHAPES)


@cache
def found(root: Path, optimizer: str) -> list[Found]:
    """By rank, of the same four processes; the runs are in ``root``."""
    return run_ranks(reshape_all, 4, str(root), optimizer, timeout=280)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@each_optimizer
def test_every_shape_loads_the_bits_that_every_other_saved_and_goes_on_alike(optimizer: str, root: Path) -> None:
    check_bits(root / optimizer, found(root / optimizer, optimizer), SHAPES)


@each_optimizer
def test_the_next_thousand_samples_are_those_that_the_source_would_have_taken(optimizer: str, root: Path) -> None:
    check_samples(found(root / optimizer, optimizer))
