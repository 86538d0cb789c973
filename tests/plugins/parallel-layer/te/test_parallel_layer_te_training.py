"""Runs of several ranks with the stand-in train like one with dense layers: modules are told the truth of the split."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.support.checkout import ROOT
from tests.support.training import Seen, train

pytestmark = pytest.mark.multiproc

PLUGIN = f"parallel-layer={ROOT / 'tests/plugins/engine/plugin.py'}"
SETS = ("train.steps=4", "model.dropout=0", "run.threads=1")
RUNS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "tensor, not fused": (2, (f"{PLUGIN},fuse_weight_gradients=false",), ("parallel.tensor=2",)),
    "sequence": (2, (PLUGIN,), ("parallel.tensor=2", "parallel.sequence=true")),
    "zero-bubble, delayed": (2, (f"{PLUGIN},delay_weight_gradients=true", "schedule=zero-bubble"), ()),
    "recomputed": (1, (PLUGIN,), ("train.recompute=full",)),
}


@cache
def trained(world: int, plugins: tuple[str, ...] = (), sets: tuple[str, ...] = ()) -> list[Seen]:
    return train(world, sets=SETS + sets, plugins=plugins)


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_gradient_norms_are_those_of_dense_layers(name: str) -> None:
    (dense,), (first, *_) = trained(1), trained(*RUNS[name])
    np.testing.assert_allclose(first.losses, dense.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(first.norms, dense.norms, rtol=1e-4)
    np.testing.assert_allclose(first.validation, dense.validation, rtol=0, atol=1e-5)


def test_ranks_hold_the_logical_tensors_of_dense_layers() -> None:
    (dense,), ranks = trained(1), trained(*RUNS["sequence"])
    assert all(seen.gradients.keys() == dense.gradients.keys() for seen in ranks)
