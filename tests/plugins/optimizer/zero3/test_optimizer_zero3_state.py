"""Runs go on with another optimizer, and adapters learn on weights of which a rank has a share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.resuming import SMALL, attempt
from tests.support.training import kept_groups

RANKS, STEPS, STOP = 2, 5, 2
SETS: dict[str, Any] = {**SMALL, "train.steps": STEPS, "optimizer.bucket_size": 1, "model.num_layers": 2}
ZERO3 = "optimizer=zero3,whole_below=0,reduce=step"
#: Numbers of each step, on rank 0.
Numbers = dict[int, dict[str, Any]]


def change(rank: int, world: int, root: str) -> list[Numbers]:
    """An undisturbed run, and one that each optimizer begins and the other one ends."""
    with found_once(), kept_groups():
        where: dict[str, Any] = {"rank": rank, "world": world}
        whole = attempt(Path(root) / "whole", SETS, ("optimizer=zero1",), **where)
        found = [whole.numbers]
        for first, second in (("optimizer=zero1", ZERO3), (ZERO3, "optimizer=zero1")):
            folder = Path(root) / first.partition(",")[0]
            begun = attempt(folder, SETS, (first,), stop_after=STOP, **where)
            ended = attempt(folder, SETS, (second,), number=2, **where)
            assert ended.first == STOP + 1
            found.append({**begun.numbers, **ended.numbers})
        return found


@pytest.mark.multiproc
def test_what_one_optimizer_has_saved_the_other_goes_on_from(tmp_path: Path) -> None:
    (whole, *changed), _ = run_ranks(change, RANKS, str(tmp_path), timeout=200)
    assert sorted(whole) == [*range(1, STEPS + 1)]
    assert changed == [whole, whole]


def adapt(rank: int, world: int, root: str) -> list[Numbers]:
    """Adapters of saved weights, with each optimizer; the last one also goes on from its own saved step."""
    with found_once(), kept_groups():
        where: dict[str, Any] = {"rank": rank, "world": world}
        attempt(Path(root) / "base", SETS, ("optimizer=zero1",), **where)
        sets = {**SETS, "run.init_from": str(Path(root) / "base"), "train.lr": 0.01}
        layers = "parallel-layer=dense+lora"
        found = [
            attempt(Path(root) / optimizer.partition(",")[0], sets, (optimizer, layers), **where).numbers
            for optimizer in ("optimizer=zero1", ZERO3)
        ]
        begun = attempt(Path(root) / "again", sets, (ZERO3, layers), stop_after=STOP, **where)
        ended = attempt(Path(root) / "again", sets, (ZERO3, layers), number=2, **where)
        return [*found, {**begun.numbers, **ended.numbers}]


@pytest.mark.multiproc
def test_adapters_learn_on_frozen_shares_what_they_learn_on_whole_weights(tmp_path: Path) -> None:
    (whole, *shared), _ = run_ranks(adapt, RANKS, str(tmp_path), timeout=200)
    assert sorted(whole) == [*range(1, STEPS + 1)]
    assert shared == [whole, whole]
