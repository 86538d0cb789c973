"""Runs whose parameters are whole only where a segment needs them; ``make sharded-grid`` runs hundreds of them."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

from tests.integration.sharded_grid import FEATURES, PRODUCT, Split, Trained, selection, trained
from tests.integration.whole_sharded_grid import run
from tests.support.training import Seen

pytestmark = pytest.mark.timeout(600)

#: What shows each axis, and what reads parameters or leaves gradients in a way of its own.
BY_DAY = [
    Split("experts on ranks", 4, precision="bf16", reduce="step"),
    Split("recomputed attention", 1, context=2, precision="bf16", reduce="step"),
    Split("an overflow", 2, precision="fp16", held=0, reduce="step"),
    Split("plain", 2, schedule="interleaved"),
]
BY_NIGHT = [
    Split("chunks of the loss, smoothing", 2, schedule="zero-bubble,variant=h1", reduce="step"),
    Split("experts with biases", 2),
    Split("clipped scores", 2, precision="bf16", reduce="step"),
]


@pytest.mark.multiproc
@pytest.mark.parametrize("splits", [BY_DAY, pytest.param(BY_NIGHT, marks=pytest.mark.nightly)], ids=["some", "others"])
def test_shares_train_as_whole_parameters_do(splits: list[Split]) -> None:
    whole = {each.split: each for each in trained(list(dict.fromkeys(split.whole for split in splits)))}
    found = list(trained(splits))
    assert {each.split for each in found} == set(splits)
    assert not [fault for each in found for fault in each.faults(whole[each.split.whole])]


@pytest.mark.nightly
def test_the_selection_shows_all_and_every_row_can_run() -> None:
    assert all(split.possible for split in (*BY_DAY, *BY_NIGHT))
    chosen = selection(200)
    assert len(set(chosen)) == len(chosen) >= 200
    assert {split.feature for split in chosen} == set(FEATURES) == {split.feature for split in PRODUCT}


def test_a_run_that_learns_something_else_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    split = Split("untied", 4)
    assert split.exact

    def found(splits: Sequence[Split]) -> list[Trained]:
        seen = Seen([5.0] * 3, [1.0] * 3, [5.0])
        return [Trained(each, seen, {"x master": np.array([1e-9 * (each.held + 1)])}) for each in splits]

    with mock.patch("tests.integration.whole_sharded_grid.trained", found):
        assert run([split]) == 1
    seen = capsys.readouterr()
    assert seen.err.splitlines() == [f"{split}: 1 tensors of the state differ, x master among them"]
    assert "| untied | 1 | 0 |" in seen.out.splitlines()
    assert {"- runs: 1, of which differ: 1", "- compared to the bit: 1"} <= {*seen.out.splitlines()}
