"""The parts of the pipeline benchmark that decide whether its table can be believed; no time is asserted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.pipeline import pair_rows, undisturbed
from benchmarks.pipeline_pairs import PAIRS, difference, measure_pairs
from benchmarks.pipeline_quiet import busy_seconds
from benchmarks.pipeline_sleep import ideal, make_plan, makespan
from tests.support.ranks import run_ranks


def sample(ours: float, theirs: float, foreign: float) -> dict[str, float]:
    """A pair of steps, disturbed during theirs."""
    times = {"ours_seconds": ours, "theirs_seconds": theirs, "ours_processor": ours, "theirs_processor": theirs}
    return {**times, "ours_foreign": 0.0, "theirs_foreign": foreign}


def test_samples_taken_while_something_else_ran_are_dropped() -> None:
    samples = [sample(1, 1, 0.3), *(sample(1, 2, 0.01) for _ in range(3))]
    assert undisturbed(samples) == (samples[1:], True)
    found = [{"ours": "a", "theirs": "b", "apart": 0.0, "samples": samples}]
    assert list(pair_rows(found))[2] == "| a | b | 1.000 | 2.000 | 0.500 | 0.500 | equal | 3 of 4 |"


def test_a_busy_machine_leaves_the_least_disturbed_half_and_says_so() -> None:
    samples = [sample(1, 1, share) for share in (0.9, 0.2, 0.5, 0.3)]
    assert undisturbed(samples) == ([samples[1], samples[3]], False)


def test_idle_and_waiting_time_is_not_busy() -> None:
    stat = "cpu  100 20 30 4000 500 6 7 8 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert busy_seconds(stat) == pytest.approx((100 + 20 + 30 + 6 + 7 + 8) / 100)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("gpipe", 3 / 8), ("1f1b", 3 / 8), ("interleaved", 3 / 16), ("zb-h1", 1 / 8), ("zb-v", 1 / 16)],
)
def test_planned_time_over_ideal_is_the_formula_of_the_papers(schedule: str, expected: float) -> None:
    plan = make_plan(schedule, 4)
    assert makespan(plan) / ideal(plan) - 1 == pytest.approx(expected)


def test_a_wrong_or_missing_gradient_is_seen() -> None:
    one = {"a": torch.tensor([1.0, 4.0]), "b": torch.ones(2)}
    assert difference(one, one) == 0
    assert difference({**one, "a": torch.tensor([1.0, 3.0])}, one) == 0.25
    with pytest.raises(ValueError, match="'b'"):
        difference({"a": one["a"]}, one)


def compare(rank: int, world: int) -> list[dict[str, Any]]:
    return measure_pairs("tiny", 1)


@pytest.mark.multiproc
def test_both_sides_of_every_pair_make_the_same_gradients() -> None:
    found = run_ranks(compare, 2, timeout=110)[0]
    assert [(pair["ours"], pair["theirs"]) for pair in found] == [(pair.ours, pair.theirs) for pair in PAIRS]
    assert [pair["apart"] for pair in found] == [0.0] * len(PAIRS)
    assert all(pair["samples"][0][f"{side}_seconds"] > 0 for pair in found for side in ("ours", "theirs"))
