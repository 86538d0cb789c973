"""Runs of several ranks with the stand-in train like one with dense layers: modules are told the truth of the split."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from megatron_run.config.request import Request
from tests.support.checkout import ROOT
from tests.support.training import Seen, train_here, train_many

pytestmark = pytest.mark.multiproc

PLUGIN = f"parallel-layer={ROOT / 'tests/plugins/engine/plugin.py'}"
SETS = (
    "train.steps=3",
    "train.sequence_length=16",
    "train.global_batch_size=4",
    "model.num_layers=2",
    "eval.batches=1",
    "model.dropout=0",
    "run.threads=1",
)
RUNS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "tensor, not fused": (2, (f"{PLUGIN},fuse_weight_gradients=false",), ("parallel.tensor=2",)),
    "sequence": (2, (PLUGIN,), ("parallel.tensor=2", "parallel.sequence=true")),
    "zero-bubble, delayed": (2, (f"{PLUGIN},delay_weight_gradients=true", "schedule=zero-bubble"), ()),
    "recomputed": (1, (PLUGIN,), ("train.recompute=full",)),
}


@cache
def trained(world: int) -> dict[str, list[Seen]]:
    """The runs of ``world`` ranks by name, and by rank; the first of one rank has dense layers."""
    runs = {"dense": (1, (), ()), **RUNS}
    mine = {name: (plugins, sets) for name, (ranks, plugins, sets) in runs.items() if ranks == world}
    requests = [Request(("preset:tiny",), (*SETS, *sets), plugins, nproc=world) for plugins, sets in mine.values()]
    if world == 1:
        return {name: [train_here(0, 1, request.to_json())] for name, request in zip(mine, requests, strict=True)}
    return dict(zip(mine, train_many(world, requests), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_gradient_norms_are_those_of_dense_layers(name: str) -> None:
    (dense,), (first, *_) = trained(1)["dense"], trained(RUNS[name][0])[name]
    np.testing.assert_allclose(first.losses, dense.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(first.norms, dense.norms, rtol=1e-4)
    np.testing.assert_allclose(first.validation, dense.validation, rtol=0, atol=1e-5)


def test_ranks_hold_the_logical_tensors_of_dense_layers() -> None:
    (dense,), ranks = trained(1)["dense"], trained(2)["sequence"]
    assert all(seen.gradients.keys() == dense.gradients.keys() for seen in ranks)
