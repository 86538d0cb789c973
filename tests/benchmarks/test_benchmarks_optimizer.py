"""The parts of the optimizer benchmark that decide whether its tables can be believed; no time is asserted."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.optimizer import muon
from benchmarks.optimizer.peers import deepspeed
from benchmarks.optimizer.speed import (
    ADAMW,
    AT_ONCE,
    DDP,
    DDP_ZERO,
    DEEPSPEED,
    DEEPSPEED3,
    FSDP2,
    FSDP2_RESHARDING,
    REPLICATED,
    SENDING,
    SENDING_NOTHING,
    SILENT,
    ZERO1,
    ZERO3,
    ZERO3_HELD,
    measure,
    overlap_table,
    state_table,
    time_table,
)
from tests.support.ranks import run_ranks

SECONDS = {ZERO1: 1.1, AT_ONCE: 1.3, SILENT: 1.0, DDP: 1.0, DEEPSPEED: 2.0, SENDING: 0.45, SENDING_NOTHING: 0.05}
FOUND = {
    "apart": {ZERO1: 0.0, DDP: 2e-6},
    "state": {ZERO1: 44, SILENT: 44, DDP: 80, DEEPSPEED: 40},
    "parameters": 10,
    "samples": [
        {f"{name} seconds": seconds for name, seconds in SECONDS.items()}
        | {f"{name} processor": 2 * seconds for name, seconds in SECONDS.items()}
        | {f"{name} foreign": 0.0 for name in SECONDS}
    ]
    * 3,
}


def test_rows_hold_medians() -> None:
    rows = list(time_table(FOUND))[2:]
    assert rows[0] == "| zero1 | 1.100 | 1.100 | 1.000 | 1.100 | equal | 3 of 3 |"
    assert rows[1] == "| zero1, silent | 1.000 | 1.000 | 1.100 | 1.000 | not compared | 3 of 3 |"
    assert rows[2] == "| DDP | 1.000 | 1.000 | 1.100 | 1.000 | 2e-06 | 3 of 3 |"


def test_what_is_hidden_is_what_a_step_is_not_longer_by() -> None:
    """0.4 s of communication: 0.1 s of it are left with overlap, 0.3 without."""
    assert list(overlap_table(FOUND))[2:] == [
        "| communication alone | 0.400 |  | 3 of 3 |",
        "| zero1 | 0.100 | 75% | 3 of 3 |",
        "| zero1, no overlap | 0.300 | 25% | 3 of 3 |",
    ]


def test_the_formula_is_eight_bytes_a_parameter_by_the_ranks_that_share() -> None:
    rows = list(state_table(FOUND))[2:]
    assert rows[0] == "| zero1 | 44 | 40 | 4 (10.00%) |"
    assert rows[2] == "| DDP | 80 | 80 | 0 (0.00%) |"


def measure_tiny(rank: int, world: int) -> dict[str, Any]:
    return measure("tiny", 1)


@pytest.mark.multiproc
@pytest.mark.nightly
def test_every_side_trains_alike_and_holds_the_state_that_it_should() -> None:
    found = run_ranks(measure_tiny, 2, timeout=280)[0]
    sides = {ZERO1, AT_ONCE, ZERO3, ZERO3_HELD, ADAMW, SILENT, DDP, DDP_ZERO, FSDP2, FSDP2_RESHARDING}
    sides |= {DEEPSPEED, DEEPSPEED3} if deepspeed.installed() else set()
    assert found["state"].keys() == sides
    assert found["apart"].keys() == sides - {SILENT}
    assert found["apart"][AT_ONCE] == found["apart"][ADAMW] == 0.0
    for name, held in found["state"].items():
        assert held / found["parameters"] == pytest.approx(8 if name in REPLICATED else 4, rel=0.02), name
    assert all(found["samples"][0][f"{name} seconds"] > 0 for name in (*sides, SENDING, SENDING_NOTHING))


def _muon(rank: int, world: int) -> dict[str, Any]:
    muon.CASES = {"few": muon.Matrices("few", {(16, 24): 3, (24, 16): 2})}
    return muon.measure("few", 1)


@pytest.mark.multiproc
@pytest.mark.parametrize(("world", "other"), [(1, muon.TORCH), (2, muon.NAIVE)])
def test_sides_of_muon_take_the_same_step(world: int, other: str) -> None:
    found = run_ranks(_muon, world)[0]
    assert found["apart"].keys() == {muon.OURS, muon.ONE_BY_ONE, other}
    assert max(found["apart"].values()) <= muon.TOLERANCE
    assert f"{muon.OURS} seconds" in found["samples"][0]
