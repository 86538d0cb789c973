"""The parts of the benchmark of experts that decide whether its tables can be believed; no time is asserted."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.moe.peers.dense import NAME as DENSE
from benchmarks.moe.peers.huggingface import WAYS, installed, name_of
from benchmarks.moe.peers.naive import NAME as NAIVE
from benchmarks.moe.speed import APART, OURS, measure, time_table
from tests.support.ranks import run_ranks


def test_rows_hold_medians_of_ratios() -> None:
    seconds = {OURS: 0.01, NAIVE: 0.02}
    sample = {f"{name} seconds": taken for name, taken in seconds.items()} | {
        f"{name} foreign": 0.0 for name in seconds
    }
    found = {"sides": list(seconds), "apart": {OURS: 1e-6, NAIVE: 0.0}, "samples": [sample] * 3}
    assert list(time_table({"fp32": found}))[2:] == [
        f"| {OURS}, fp32 | 10.0 | 2.00 | 1e-06 | 3 of 3 |",
        f"| {NAIVE}, fp32 | 20.0 | 1.00 | equal | 3 of 3 |",
    ]


def measure_tiny(rank: int, world: int) -> dict[str, Any]:
    return {precision: measure("tiny", precision, 1) for precision in ("fp32", "bf16")}


@pytest.mark.multiproc
@pytest.mark.nightly
def test_all_sides_compute_the_same_layer() -> None:
    found = run_ranks(measure_tiny, 1, timeout=280)[0]
    others = [name_of(way) for way in WAYS if installed()]
    for precision, each in found.items():
        assert each["sides"] == [OURS, NAIVE, *others, DENSE]
        assert each["apart"][OURS] < APART[precision] / 3
        assert all(each["samples"][0][f"{side} seconds"] > 0 for side in each["sides"])
