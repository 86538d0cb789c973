"""The parts of the pipeline benchmark that decide whether its tables can be believed; no time is asserted."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.pipeline.memory import measure_memory
from benchmarks.pipeline.overhead import measure_overhead
from benchmarks.pipeline.pairs import PAIRS, measure_pairs, pair_table
from benchmarks.pipeline.schedules import SCHEDULES, make_plan
from benchmarks.pipeline.sides import loss_stage
from benchmarks.pipeline.sleep import ideal, makespan, measure_sleep
from tests.support.ranks import run_ranks


def sample(ours: float, theirs: float, foreign: float) -> dict[str, float]:
    """A pair of steps, disturbed during theirs."""
    times = {"ours_seconds": ours, "theirs_seconds": theirs, "ours_processor": ours, "theirs_processor": theirs}
    return {**times, "ours_foreign": 0.0, "theirs_foreign": foreign}


def test_a_row_names_both_splits_and_holds_the_medians_of_undisturbed_samples() -> None:
    samples = [sample(1, 1, 0.3), *(sample(1, 2, 0.01) for _ in range(3))]
    row = list(pair_table([{"pair": 5, "apart": 0.0, "samples": samples}]))[2]
    names = "zb-v | V 1, 2, 2, 1 | ScheduleInterleavedZeroBubble | loop 2, 1, 2, 1"
    assert row == f"| {names} | 1.000 | 2.000 | 0.500 | 0.500 | equal | 3 of 4 |"


def test_where_the_splits_differ_it_is_said_why_that_is_fair() -> None:
    assert [bool(pair.fair) for pair in PAIRS] == [SCHEDULES[pair.schedule].split != pair.split for pair in PAIRS]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_stage_with_the_head_computes_two_layers_and_the_other_four(name: str) -> None:
    split = SCHEDULES[name].split
    layout, layers = make_plan(name, 2, 8, split.counts).layout, [0, 0]
    for place in layout:
        layers[place.stage] += len(place.layers)
    assert layout[-1].stage == loss_stage(split)
    assert (layers[loss_stage(split)], layers[1 - loss_stage(split)]) == (2, 4)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("gpipe", 3 / 8), ("1f1b", 3 / 8), ("interleaved", 3 / 16), ("zb-h1", 1 / 8), ("zb-v", 1 / 16)],
)
def test_planned_time_over_ideal_is_the_formula_of_the_papers(schedule: str, expected: float) -> None:
    plan = make_plan(schedule, 4, 8)
    assert makespan(plan) / ideal(plan) - 1 == pytest.approx(expected)


def measure_tiny(rank: int, world: int) -> dict[str, Any]:
    peaks = [
        measure_memory("tiny", "1f1b", None, 1),
        measure_memory("tiny", "zb-v", "ScheduleZBVZeroBubble", 1, keep_outputs=True),
    ]
    return {
        "pairs": measure_pairs("tiny", 1),
        "peaks": peaks,
        "overhead": measure_overhead(3, 1),
        "sleep": measure_sleep(0.001, 1),
    }


@pytest.mark.multiproc
@pytest.mark.nightly
def test_every_part_measures() -> None:
    """In both sides of every pair the same gradients are made, bit for bit."""
    found = run_ranks(measure_tiny, 2, timeout=280)[0]
    assert [pair["pair"] for pair in found["pairs"]] == list(range(len(PAIRS)))
    assert [pair["apart"] for pair in found["pairs"]] == [0.0] * len(PAIRS)
    assert all(pair["samples"][0][f"{side}_seconds"] > 0 for pair in found["pairs"] for side in ("ours", "theirs"))
    assert all(2**25 < peak < 2**33 for peak in found["peaks"])
    (sample,) = found["overhead"]["samples"]
    assert all(found["overhead"][each] > 0 and sample[f"{each}_seconds"] > 0 for each in ("executor", "bare"))
    assert [row["schedule"] for row in found["sleep"]] == list(SCHEDULES)
    assert all(row["samples"][0]["seconds"] > row["planned"] * 0.99 for row in found["sleep"])
