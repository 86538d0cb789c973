"""Values that Optuna draws: within their axes, the same after a kill, better where earlier runs were."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_run_sweep.axes import read_axes
from megatron_run_sweep.sampler import Earlier, draw

pytest.importorskip("optuna")

AXES = read_axes(["train.lr=1e-4..1e-2:log", "model.num_layers=1..8", "optimizer.use=adamw,zero1"], ranges=True)


def drawn(count: int, **options: Any) -> list[Earlier]:
    found: list[Earlier] = []
    for _ in range(count):
        values = draw(AXES, 7, found, **{"maximize": False, **options})
        found.append((values, None if len(found) == 2 else abs(float(values["train.lr"]) - 3e-3)))
    return found


def test_values_lie_on_their_axes() -> None:
    for values, _ in drawn(12):
        assert 1e-4 <= float(values["train.lr"]) <= 1e-2
        assert 1 <= int(values["model.num_layers"]) <= 8
        assert values["optimizer.use"] in ("adamw", "zero1")


def test_a_draw_depends_on_the_seed_and_what_was_before_alone() -> None:
    before = drawn(5)
    assert draw(AXES, 7, before, maximize=False) == draw(AXES, 7, before, maximize=False)
    assert draw(AXES, 8, before, maximize=False) != draw(AXES, 7, before, maximize=False)


def test_later_draws_follow_what_earlier_ones_came_to() -> None:
    found = [abs(float(values["train.lr"]) - 3e-3) for values, _ in drawn(40)]
    assert sum(found[25:]) / 15 < sum(found[:10]) / 10
