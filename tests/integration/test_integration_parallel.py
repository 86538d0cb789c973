"""Data parallelism, alone and with a pipeline, gives the losses of one process; pipelines alone are in the grid's."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.integration.write_golden import SETS
from tests.support.training import Seen, train

GOLDEN = Path(__file__).parent / "golden" / "tiny.json"
#: A few steps.
FEW = ("train.steps=4", "eval.interval=2", "eval.batches=1")
SPLITS = {
    "data-2": (2, (), (*FEW, "parallel.data=2")),
    "1f1b-p2-data-2": (4, ("schedule=1f1b",), (*FEW, "parallel.data=2")),
}

pytestmark = pytest.mark.multiproc


@cache
def trained(world: int, plugins: tuple[str, ...] = (), sets: tuple[str, ...] = FEW) -> list[Seen]:
    return train(world, sets=sets, plugins=plugins)


@pytest.mark.nightly  # as the command does, in test_integration_golden
def test_the_single_process_gives_the_golden_losses() -> None:
    golden = json.loads(GOLDEN.read_text())
    (seen,) = trained(1, sets=SETS)
    np.testing.assert_allclose(seen.losses, golden["losses"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(seen.validation, golden["validation"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_gives_the_losses_of_the_single_process(split: str) -> None:
    (alone,), (first, *_) = trained(1), trained(*SPLITS[split])
    np.testing.assert_allclose(first.losses, alone.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(first.norms, alone.norms, rtol=1e-4)
    np.testing.assert_allclose(first.validation, alone.validation, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "plugin", "first", "last"),
    [
        pytest.param(3, "schedule=1f1b", 3, 1, marks=pytest.mark.nightly),
        (2, "schedule=interleaved", 2, 4),
        (2, "schedule=zero-bubble,variant=v", 2, 4),
    ],
)
def test_an_uneven_split_gives_the_losses_of_the_single_process(world: int, plugin: str, first: int, last: int) -> None:
    six = (*FEW, "model.num_layers=6")
    ends = (f"parallel.first_stage_layers={first}", f"parallel.last_stage_layers={last}")
    (alone,), stages = trained(1, (), six), trained(world, (plugin,), (*six, f"parallel.pipeline={world}", *ends))
    np.testing.assert_allclose(stages[0].losses, alone.losses, rtol=0, atol=1e-5)
    held = [len({name.split(".")[1] for name in seen.gradients if name.startswith("layers.")}) for seen in stages]
    assert (held[0], held[-1], sum(held)) == (first, last, 6)
