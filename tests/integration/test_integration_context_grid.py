"""Ranks that split the tokens of samples train what one process does; ``make context-grid`` runs hundreds of splits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.integration.context_grid import DATA, FEATURES, PRODUCT, SETS, Split, selection, write_texts
from tests.integration.context_grid_checks import Trained, run_context_cases, trained
from tests.integration.pieces import Case, Ran, joined
from tests.integration.whole_context_grid import run
from tests.support.ranks import run_ranks
from tests.support.training import Seen

pytestmark = pytest.mark.timeout(600)

#: What shows each way of meeting; by night what is most unlike on a part of the tokens, too.
BY_DAY = [
    Split("documents, rope, window", 2, method="ring"),
    Split("grouped queries", 2, schedule="interleaved", method="ulysses"),
    Split("softcap and scale", 4, method="all_gather"),
    Split("clipped scores", 2, tensor=2, method="ring"),
    Split("mean over tokens", 2, optimizer="zero1", dtype="float32"),
]
BY_NIGHT = [
    Split("rope, yarn", 2, method="ulysses"),
    Split("sequence parallelism", 2, tensor=2, method="ring"),
    Split("clipped scores", 2, method="ulysses"),
    Split("clipped scores", schedule="interleaved", data=2, optimizer="zero1"),
    Split("recomputed", 2, schedule="zero-bubble,variant=h1", method="ring"),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder)
    return folder


@pytest.mark.multiproc
@pytest.mark.parametrize("splits", [BY_DAY, pytest.param(BY_NIGHT, marks=pytest.mark.nightly)], ids=["some", "others"])
def test_split_samples_train_as_one_process_does(splits: list[Split], texts: Path) -> None:
    alone = {each.split: each for each in trained(list(dict.fromkeys(split.alone for split in splits)), texts)}
    found = list(trained(splits, texts))
    assert {each.split for each in found} == set(splits)
    assert not [fault for each in found for fault in each.faults(alone[each.split.alone])]


@pytest.mark.nightly
def test_the_selection_shows_all_and_every_row_can_run() -> None:
    assert all(split.possible for split in (*BY_DAY, *BY_NIGHT))
    assert {split.method for split in BY_DAY} == {split.method for split in PRODUCT}
    chosen = selection(300)
    assert len(set(chosen)) == len(chosen) >= 300
    assert {split.feature for split in chosen} == set(FEATURES)


def test_a_run_that_learns_something_else_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    split = Split("plain", 2)

    def found(splits: Sequence[Split], texts: Path) -> list[Trained]:
        seen = Seen([5.0] * 3, [1.0] * 3, [5.0])
        return [Trained(each, seen, {"x": np.array([2e-7 * (each.context - 1)])}) for each in splits]

    with mock.patch("tests.integration.whole_context_grid.trained", found):
        assert run([split]) == 1
    seen = capsys.readouterr()
    assert seen.err.splitlines() == [f"{split}: x is 2.0e-07 off"]
    assert "| plain | 1 | 0 |" in seen.out.splitlines()
    assert "- runs: 1, of which differ: 1" in seen.out.splitlines()


DROPPED = (*SETS, "model.dropout=0.2", "parallel.context=2")
CONTEXT = ("parallel-layer=dense+context", DATA)
#: Runs that drop the same, whatever is recomputed, and in whatever order and on whichever stage it is computed.
ALIKE = {
    2: {"kept": Case(DROPPED, CONTEXT), "recomputed": Case((*DROPPED, "train.recompute=full"), CONTEXT)},
    4: {
        "zero bubble": Case(
            (*DROPPED, "parallel.pipeline=2", "train.recompute=core_attn"), (*CONTEXT, "schedule=zero-bubble")
        ),
        "data": Case((*DROPPED, "parallel.data=2"), CONTEXT),
    },
}


@cache
def dropped(world: int) -> dict[str, list[Ran]]:
    found = [
        [rank for rank in ranks if isinstance(rank, Ran)]
        for ranks in run_context_cases(world, [*ALIKE[world].values()])
    ]
    return dict(zip(ALIKE[world], found, strict=True))


@pytest.mark.multiproc
def test_dropout_is_the_same_when_it_is_recomputed() -> None:
    kept, recomputed = dropped(2)["kept"], dropped(2)["recomputed"]
    assert kept[0].losses == recomputed[0].losses
    for name, values in joined(kept).items():
        np.testing.assert_array_equal(values, joined(recomputed)[name], err_msg=name)


@pytest.mark.nightly
@pytest.mark.multiproc
def test_dropout_is_the_same_on_other_stages_and_for_other_samples() -> None:
    for other in dropped(4).values():
        np.testing.assert_allclose(other[0].losses, dropped(2)["kept"][0].losses, rtol=2e-6)


#: fp16 with a scale that halves at the first overflow.
HALF = ("train.precision=fp16", "scaler.initial_loss_scale=1024", "scaler.hysteresis=1")
STEP_WITH_OVERFLOW, MICROBATCHES = 2, 4


def overflow(rank: int, world: int, optimizer: str) -> tuple[list[bool], float]:
    """Train in fp16; in one step gradients of the last rank's tokens overflow. The steps that were skipped, by rank 0's
    account, and this rank's scale at the end."""
    import torch

    from megatron_run.config.request import Request
    from megatron_run.contracts import Observer, StepMetrics
    from megatron_run_engine.training.loss_weights import LossWeights
    from tests.support.training import shared_folder, train_in_process

    seed, seeded, skipped, assemblies = LossWeights.seed, list[int](), list[bool](), list[Any]()

    class Watch(Observer):
        def on_step_end(self, metrics: StepMetrics) -> None:
            skipped.append(metrics.skipped)

    def overflowing(weights: LossWeights, *arguments: Any) -> torch.Tensor:
        seeded.append(1)
        step = (len(seeded) - 1) // MICROBATCHES + 1
        return seed(weights, *arguments) * (torch.inf if rank == world - 1 and step == STEP_WITH_OVERFLOW else 1)

    sets = (*SETS, *HALF, f"parallel.context={world}")
    plugins = ("parallel-layer=dense+context", f"optimizer={optimizer}", "scaler=dynamic", DATA)
    request = Request(("preset:tiny",), sets, plugins, nproc=world)
    with shared_folder(rank, world) as folder, mock.patch.object(LossWeights, "seed", overflowing):
        train_in_process(
            request, rank, world, folder, built=lambda _, made: assemblies.append(made), started=lambda _: [Watch()]
        )
    return skipped, float(assemblies[0].scaler.scale)


@pytest.mark.multiproc
@pytest.mark.parametrize("optimizer", ["adamw", "zero1"])
def test_an_overflow_in_one_piece_makes_every_rank_skip_the_step(optimizer: str) -> None:
    found = run_ranks(overflow, 2, optimizer)
    assert found[0][0] == [False, True, False]
    assert [scale for _, scale in found] == [512, 512]
