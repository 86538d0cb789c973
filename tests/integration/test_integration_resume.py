"""What one shape of ranks saved another loads: every value of weights and moments bit for bit, and the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.reshaping import SHAPES, Found, check_bits, check_samples, reshape
from tests.support.ranks import run_ranks
from tests.support.training import found_once

pytestmark = pytest.mark.multiproc

OPTIMIZERS = ("adamw", "zero1")
#: By rank and optimizer; the folder that holds the runs.
Ranks = tuple[Path, list[Mapping[str, Found]]]


def train_and_reshape(rank: int, world: int, root: str) -> Mapping[str, Found]:
    """All twelve pairs of shapes with each optimizer."""
    with found_once():
        return {name: reshape(rank, world, Path(root) / name, name, SHAPES) for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """All in the same four processes."""
    root = tmp_path_factory.mktemp("shapes")
    return root, run_ranks(train_and_reshape, 4, str(root), timeout=280)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_shape_loads_the_bits_that_every_other_saved_and_goes_on_alike(optimizer: str, found: Ranks) -> None:
    root, by_rank = found
    check_bits(root / optimizer, [rank[optimizer] for rank in by_rank], SHAPES)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_next_thousand_samples_are_those_that_the_source_would_have_taken(optimizer: str, found: Ranks) -> None:
    check_samples([rank[optimizer] for rank in found[1]])
