"""The parts of the checkpoint benchmark that decide whether its tables can be believed; no time is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint import speed, stall
from benchmarks.checkpoint.speed import CALLS, DCP, OURS, SYNCED, UNSYNCED, goal_table, speed_table
from benchmarks.checkpoint.stall import INTERVAL, lost_steps
from tests.support.ranks import run_ranks

SECONDS = {OURS: (2.0, 1.0, 4.0), DCP: (3.0, 1.0, 5.0), SYNCED: (2.0, 0.5, 4.0), UNSYNCED: (1.0, 0.5, 4.0)}
SAMPLES = [
    {
        f"{name}, {call} seconds": seconds
        for name, row in SECONDS.items()
        for call, seconds in zip(CALLS, row, strict=True)
    }
    | {f"{name}, {call} foreign": 0.0 for name in SECONDS for call in CALLS}
] * 3


def test_rates_are_bytes_by_seconds_and_goals_are_their_ratios() -> None:
    rows = list(speed_table(SAMPLES, 4_000_000_000))[2:]
    assert rows[0] == "| ours | 2.00 | 4.00 | 1.00 | 3 of 3; 3 of 3; 3 of 3 |"
    assert rows[3] == "| torch.save | 4.00 | 8.00 | 1.00 | 3 of 3; 3 of 3; 3 of 3 |"
    assert list(goal_table(SAMPLES))[2:] == [
        "| torch.distributed.checkpoint | 1.50 | 1.00 | 1.25 | at least 1.00 | yes |",
        "| torch.save, synced | 1.00 | 0.50 | 1.00 | at least 1.00 | no |",
    ]


def test_what_is_lost_to_a_save_is_what_its_steps_took_longer_than_the_last_before_the_next() -> None:
    quick = [1.0] * (INTERVAL - 1)
    first = [3.0, 1.5, *[1.0] * (INTERVAL - 2)]  # two steps' time to stand still, and half of one beside the writing
    second = [2.0] * INTERVAL  # a machine that has become slower has lost nothing
    assert lost_steps([*quick, *first, *second, *quick]) == pytest.approx([2.5, 0.0])


def measure_tiny(rank: int, world: int, folder: str) -> dict[str, Any]:
    speeds = speed.measure(f"{folder}/speed", "tiny", 1)
    return {"speed": speeds, "stall": stall.measure(f"{folder}/stall", "tiny", 1, True)}


@pytest.mark.multiproc
@pytest.mark.nightly
def test_every_side_loads_what_it_saved_and_a_training_saves_in_the_background(tmp_path: Path) -> None:
    for name in ("speed", "stall"):
        (tmp_path / name).mkdir()
    found = run_ranks(measure_tiny, 2, str(tmp_path))[0]
    sample = found["speed"]["samples"][0]
    assert {key.removesuffix(" seconds") for key in sample if key.endswith(" seconds")} == {
        f"{name}, {call}" for name in SECONDS for call in CALLS
    }
    assert found["speed"]["bytes"] > 0
    ((still, written, size),) = found["stall"]["saves"]
    assert 0 < still <= written
    assert size > 0
    assert len(found["stall"]["steps"]) == 2 * INTERVAL - 1
