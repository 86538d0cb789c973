"""What a month yields: the simulation against Daly's closed forms, and what happens at the edges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_run.errors import InputError
from megatron_run_planner.devices import read_device
from megatron_run_planner.goodput import Conditions, best_interval, expected_useful, simulate_run, young_daly

HOUR, MONTH = 3600.0, 30 * 86400.0
#: Dubey et al. 2024: 419 unexpected interruptions in 54 days on 16,384 GPUs, 50,000 hours a GPU.
LARGE = Conditions(devices=16384, machines=2048, mtbf=50_000 * HOUR, stall=30.0, restart=600.0)


@pytest.mark.parametrize("interval", [300.0, 1200.0, 5000.0])
def test_the_simulation_is_dalys_closed_form(interval: float) -> None:
    found = simulate_run(LARGE, interval, MONTH, trials=100, seed=1)
    assert found.useful == pytest.approx(expected_useful(LARGE, interval), rel=0.01)
    assert found.low < found.useful < found.high


def test_the_best_interval_is_youngs_when_failures_are_rare() -> None:
    rare = replace(LARGE, devices=64)
    assert best_interval(rare) == pytest.approx(young_daly(rare), rel=0.03)
    assert best_interval(LARGE) == pytest.approx(young_daly(LARGE), rel=0.1)


def test_no_other_interval_yields_more() -> None:
    best = best_interval(LARGE)
    assert all(expected_useful(LARGE, best) >= expected_useful(LARGE, best * factor) for factor in (0.5, 0.9, 1.1, 2))


def test_shares_add_up_to_the_wall_time() -> None:
    found = simulate_run(replace(LARGE, spread=0.02), 1000.0, MONTH, trials=20)
    parts = found.useful + found.straggling + found.saving + found.lost + found.restarting
    assert parts == pytest.approx(1, abs=1e-6)


def test_failures_are_as_many_as_the_devices_promise() -> None:
    found = simulate_run(LARGE, 1000.0, MONTH, trials=100)
    assert found.failures == pytest.approx(MONTH / LARGE.between_failures, rel=0.05)


def test_a_seed_makes_the_same_month() -> None:
    one, two, other = (simulate_run(LARGE, 1000.0, MONTH, trials=5, seed=seed) for seed in (3, 3, 4))
    assert one == two
    assert one != other


def test_the_slowest_of_many_machines_is_slower() -> None:
    spread = replace(LARGE, spread=0.03)
    assert replace(spread, machines=1).straggling == 1
    # The mean largest of two standard normal values is 1/sqrt(pi) = 0.564; of 2,048 about 3.4.
    assert (replace(spread, machines=2).straggling - 1) / 0.03 == pytest.approx(0.564, abs=0.03)
    assert (spread.straggling - 1) / 0.03 == pytest.approx(3.4, abs=0.1)


def test_devices_that_hardly_fail_leave_saves_alone() -> None:
    calm = replace(LARGE, mtbf=1e15)
    assert simulate_run(calm, 1000.0, MONTH, trials=2).useful == pytest.approx(1000 / 1030, rel=1e-3)


def test_devices_that_fail_all_the_time_yield_nothing() -> None:
    assert expected_useful(replace(LARGE, mtbf=HOUR), 600.0) == 0.0


def test_a_device_is_like_a_shipped_one_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"like: {file}\n")
    with pytest.raises(InputError, match="no shipped device; one of a100"):
        read_device(str(file))
