"""Ranks that hang or are stopped on purpose, wherever: each is named in time, and a slow one is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Ran, run_forked, tiny

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

#: Seconds after which a rank hangs, and what the machine may take on top of it to start and to end the ranks.
LIMIT, BUSY = 2.0, 60.0


def run(folder: Path, fault: str, **values: Any) -> Ran:
    """Two stages of two data-parallel ranks: who waits for whom goes through messages and collectives."""
    sets = {"parallel.pipeline": 2, "run.timeout": LIMIT, "checkpoint.interval": 3, **values}
    return run_forked(tiny(folder, sets, ("schedule=1f1b", "optimizer=zero1"), nproc=4), fault, timeout=150)


@pytest.mark.parametrize(
    ("rank", "at", "kind"),
    [
        pytest.param(1, "backward", "hang", marks=pytest.mark.nightly),  # as "optimizer" is
        (2, "receive", "stop"),
        (3, "optimizer", "hang"),
        (0, "save-manifest", "hang"),
    ],
)
def test_a_rank_that_hangs_or_is_stopped_is_named_with_its_phase_and_the_others_end(
    rank: int, at: str, kind: str, tmp_path: Path
) -> None:
    ran = run(tmp_path / "run", f"rank={rank},step=3,at={at},kind={kind}")
    what = {"hang": "hangs", "stop": r"is stopped by a signal \(SIGSTOP\)"}[kind]
    assert ran.code == 4
    expected = (
        rf"rank {rank} {what}: nothing new for \d+\.\d s in {at}.* of step 3, rank \d.* waits? for it in .*; see "
    )
    assert re.match(expected, ran.message), ran.message
    assert ran.message.endswith(f"(log: {tmp_path}/run/logs/attempt-001/rank-{rank:05d}.log)")
    assert ran.seconds < LIMIT + BUSY


def test_a_save_behind_the_training_that_hangs_is_named_with_its_part_when_it_is_waited_for(tmp_path: Path) -> None:
    ran = run(tmp_path / "run", "rank=1,step=3,at=save-shard,kind=hang", **{"checkpoint.async_save": True})
    assert ran.code == 4
    part = r"save-shard step3/rank-00001\.safetensors of step 4"
    # Rank 0 has two threads in the save, and is where the later one of them went last.
    last = r"save(-shard step3/rank-00000\.safetensors| step4) of step 4"
    waits = rf"rank 0 and 2 more wait for it in all-reduce of 1 values, number \d over background, in {last}; see "
    assert re.match(rf"rank 1 hangs: nothing new for \d+\.\d s in {part}, {waits}", ran.message), ran.message


def test_a_step_that_takes_longer_than_the_limit_is_no_alarm_as_long_as_it_goes_on(tmp_path: Path) -> None:
    """Phases of 0.5 s, several in one step, for which the other ranks wait."""
    fault = "rank=1,step=2,at=forward,kind=slow,seconds=0.5;rank=1,step=2,at=backward,kind=slow,seconds=0.5"
    ran = run(tmp_path / "run", fault)
    assert (ran.code, ran.message) == (0, "")
    assert ran.seconds > LIMIT


def test_a_run_starts_again_by_itself_and_ends(tmp_path: Path) -> None:
    fault = "rank=2,step=4,attempt=1,at=forward,kind=kill"
    ran = run_forked(
        tiny(tmp_path / "run", {"parallel.pipeline": 2}, ("schedule=1f1b",), nproc=4), fault, max_restarts=1
    )
    assert (ran.code, ran.message) == (0, "")
    (line,) = [line for line in ran.told if "starting again" in line]
    assert re.fullmatch(
        r"a rank was killed by SIGKILL in .*; starting again, 1 of 1, from step 3 \(seen after .*\)", line
    )


def test_a_rank_that_is_slow_again_and_again_is_named_with_what_it_is_slow_in(tmp_path: Path) -> None:
    sets = {"train.steps": 10, "guard.straggler_interval": 10, "checkpoint.interval": 0}
    folder = tmp_path / "run"
    slow = run_forked(tiny(folder, sets, nproc=4), "rank=1,at=forward,kind=slow,seconds=0.03")
    assert (slow.code, slow.message) == (0, "")
    log = (folder / "logs" / "attempt-001" / "rank-00000.log").read_text()
    assert "rank 1 holds the others up in forward: it takes " in log
