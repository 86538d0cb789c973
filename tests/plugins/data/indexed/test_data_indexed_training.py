"""A run on indexed data reads the same samples in the same order in every topology, and after a resume."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_run.config.request import Request
from tests.plugins.data.indexed.corpora import corpus
from tests.support.training import Seen, train, train_many

pytestmark = pytest.mark.multiproc

SPLITS = {
    "data": ((), ("parallel.data=2",)),
    "tensor": (("parallel-layer=tensor",), ("parallel.tensor=2",)),
    "pipeline": (("schedule=1f1b",), ("parallel.pipeline=2",)),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpora")
    prefixes = [corpus(folder / name, seed, 300) for seed, name in enumerate("ab")]
    return (
        "data.use=indexed",
        f"data.paths={','.join(prefixes)}",
        "data.weights=3,1",
        "data.order=megatron",
        f"data.cache={folder}",
        "data.split=8,1,1",
        "data.vocab_size=20",
        "data.end_of_document=0",
        "data.mask_end=true",
        "train.steps=4",
        "eval.interval=2",
        "eval.batches=1",
    )


@pytest.fixture(scope="module")
def by_split(sets: tuple[str, ...]) -> dict[str, Seen]:
    requests = [
        Request(("preset:tiny",), sets=sets + more, plugins=plugins, nproc=2) for plugins, more in SPLITS.values()
    ]
    return {split: ranks[0] for split, ranks in zip(SPLITS, train_many(2, requests), strict=True)}


@pytest.fixture(scope="module")
def alone(sets: tuple[str, ...]) -> Seen:
    (seen,) = train(1, sets=sets)
    return seen


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_gives_the_losses_of_the_single_process(split: str, alone: Seen, by_split: dict[str, Seen]) -> None:
    assert len(alone.losses) == 4
    np.testing.assert_allclose(by_split[split].losses, alone.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(by_split[split].validation, alone.validation, rtol=0, atol=1e-5)
