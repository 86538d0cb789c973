"""How long a restart took, phase by phase, as rank 0 tells it in the record of the attempt."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_run_engine.launch.job import Lost
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.run_folder.restart_times import (
    NAME,
    PHASES,
    RestartTimes,
    phases,
    process_start,
    write_lost,
    write_reported,
)


def test_the_phases_are_between_the_marks_that_are_there_and_add_up() -> None:
    marks = dict(zip(("died", *PHASES), (10.0, 10.25, 11.0, 11.5, 12.0, 14.0, 14.5, 17.0), strict=True))
    assert phases(marks) == {
        "detection": 0.25, "ranks_gone": 0.75, "processes": 0.5, "join": 0.5, "build": 2.0, "load": 0.5,
        "first_step": 2.5,
    }  # fmt: skip
    assert phases({"started": 3.0, "joined": 5.0}) == {"join": 2.0}
    assert phases(marks | {"detected": 9.0})["detection"] == 0.0, "somebody has set the clock"


def done(folder: RunFolder, started: float) -> tuple[RestartTimes, dict[str, Any]]:
    """The times of an attempt that has ``started`` at that time and makes a step, and their record."""
    with mock.patch("megatron_run_engine.run_folder.restart_times.process_start", return_value=started):
        times = RestartTimes(folder)
    for mark in ("joined", "built", "loaded"):
        times.mark(mark)
    times.finish()
    return times, json.loads((folder.path / folder.records / NAME).read_text())


def test_what_the_launcher_saw_and_what_rank_0_did_become_one_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, 2)
    now = time.time()
    write_lost(folder, Lost(now - 3, now - 2, now - 1.5))
    times, record = done(folder, now - 1)
    assert record["seconds"] == times.taken
    assert list(times.taken) == list(PHASES.values())
    assert (times.taken["detection"], times.taken["ranks_gone"], times.taken["processes"]) == (1.0, 0.5, 0.5)
    assert sum(times.taken.values()) == pytest.approx(record["marks"]["stepped"] - (now - 3), abs=1e-3)
    assert record["unknown"] == []
    assert "s from the loss of a rank to the first new step: detection 1.00, ranks gone 0.50, " in str(times)


def test_of_a_restart_that_another_launcher_makes_the_unknown_is_named_and_lies_in_what_follows(tmp_path: Path) -> None:
    folder, now = RunFolder(tmp_path, 2), time.time()
    write_reported(folder, now - 4)
    times, record = done(folder, now - 1)
    assert record["unknown"] == ["detection", "ranks_gone"]
    assert record["seconds"]["processes"] == 3.0
    assert " s from the report of a lost rank to the first new step: processes 3.00, join " in str(times)
    assert str(times).endswith("; not known: detection, ranks gone")


def test_an_attempt_that_follows_no_lost_one_records_none(tmp_path: Path) -> None:
    times = RestartTimes(RunFolder(tmp_path, 1))
    times.finish()
    assert not times.taken
    assert not (tmp_path / "logs").exists()


def test_the_start_of_a_process_is_that_of_the_system(tmp_path: Path) -> None:
    code = "from megatron_run_engine.run_folder.restart_times import process_start; print(process_start())"
    before = time.time()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert before - 0.1 <= float(said.stdout) <= time.time()
    assert process_start() < before
