"""With ``train.loss_mean=token`` a step does not depend on how masked samples fall into microbatches and ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.integration.pieces import Case, Ran, run_cases

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

DATA = f"data={Path(__file__).with_name('masked_data.py')}"
SETS = (
    "train.steps=2",
    "train.global_batch_size=8",
    "train.lr_warmup=0",
    "train.lr_shape=constant",
    "train.sequence_length=16",
    "eval.interval=2",
    "eval.batches=1",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=4",
)
EXPERTS = ("model.experts.count=4", "model.experts.ffn_size=32", "train.micro_batch_size=1")
#: How four ranks share the work: (settings, plugins). The second has what the first and "all" have.
SPLITS = {
    "data": (("train.micro_batch_size=1",), ("optimizer=zero1",)),
    "tensor and data": (("train.micro_batch_size=2", "parallel.tensor=2"), ("parallel-layer=tensor",)),
    "split backward": (("train.micro_batch_size=1", "parallel.pipeline=2"), ("schedule=zero-bubble",)),
    "all": (
        ("train.micro_batch_size=1", "parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true"),
        ("schedule=1f1b", "parallel-layer=tensor"),
    ),
    "experts": ((*EXPERTS, "parallel.expert=2", "parallel.pipeline=2"), ("schedule=1f1b",)),
}


def case(sets: tuple[str, ...], plugins: tuple[str, ...] = (), loss_mean: str = "token") -> Case:
    return Case((*SETS, f"train.loss_mean={loss_mean}", *sets), (DATA, *plugins), "float64")


RARE = ("tensor and data",)


@cache
def ran(rare: bool) -> dict[str, Ran]:
    """What rank 0 saw of every rare split, or of the others."""
    splits = {name: case(*split) for name, split in SPLITS.items() if (name in RARE) is rare}
    return {name: ranks[0] for name, ranks in zip(splits, run_cases(4, list(splits.values())), strict=True)}


@cache
def alone() -> dict[str, Ran]:
    """One process: all samples in one microbatch, with experts each in its own (which balances them), and by means."""
    cases = {
        "dense": case(("train.micro_batch_size=8",)),
        "experts": case(EXPERTS),
        "means": case(("train.micro_batch_size=1",), (), "microbatch"),
    }
    return {name: ranks[0] for name, ranks in zip(cases, run_cases(1, list(cases.values())), strict=True)}


@pytest.mark.parametrize(
    "split", [pytest.param(split, marks=[pytest.mark.nightly] * (split in RARE)) for split in SPLITS]
)
def test_every_split_takes_the_steps_of_one_process(split: str) -> None:
    seen, single = ran(split in RARE)[split].seen, alone()["experts" if split == "experts" else "dense"].seen
    np.testing.assert_allclose(seen.losses, single.losses, rtol=0, atol=1e-9)
    np.testing.assert_allclose(seen.norms, single.norms, rtol=1e-6)
    np.testing.assert_allclose(seen.validation, single.validation, rtol=0, atol=1e-9)


def test_the_mean_of_means_takes_other_steps_and_evaluates_alike() -> None:
    """So the masks are as unequal as they must be for the test above to see anything."""
    token, means = alone()["dense"].seen, alone()["means"].seen
    assert token.losses[0] == pytest.approx(means.losses[0], abs=1e-9)  # what is reported is over tokens either way
    assert abs(token.norms[0] - means.norms[0]) > 0.05 * token.norms[0]
