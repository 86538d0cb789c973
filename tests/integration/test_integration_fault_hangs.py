"""Ranks that hang or are stopped: each is named, with its phase and collective, and never one that is only slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked import Ran, run_forked, tiny

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(90)]

LIMIT = 2.0
#: Seconds within which a hang is named once the limit is over, and some for a busy machine.
SOON = 2.0 + 3.0
HANGS = {
    "in a stage's work": (3, "at=backward,kind=hang", "rank 3 hangs: nothing new for ", "in backward B0.0 of step 2"),
    "before a collective": (1, "at=gradient-reduce,kind=hang", "rank 1 hangs: nothing new for ", "over data"),
    "stopped in a message": (2, "at=send,kind=stop", "rank 2 is stopped by a signal (SIGSTOP): ", "send "),
    "while it is saved": (0, "at=save-manifest,kind=hang", "rank 0 hangs: ", "in save-manifest step2 of step 2"),
}


def run(folder: Path, fault: str) -> Ran:
    sets = {"parallel.pipeline": 2, "run.timeout": LIMIT, "train.steps": 3}
    return run_forked(tiny(folder, sets, ("schedule=1f1b", "optimizer=zero1"), nproc=4), fault)


@pytest.mark.parametrize("name", HANGS)
def test_a_rank_that_goes_on_no_more_is_named_within_the_limit(name: str, tmp_path: Path) -> None:
    rank, fault, begins, tells = HANGS[name]
    hung = run(tmp_path / "run", f"rank={rank},step=2,{fault}")
    assert hung.code == 4
    assert hung.message.startswith(begins)
    assert tells in hung.message
    assert "wait" in hung.message, "a rank that waits for it says in what"
    assert "\n" not in hung.message
    log = tmp_path / "run" / "logs" / "attempt-001" / f"rank-{rank:05d}.log"  # its last word is what befell it
    assert LIMIT <= hung.ended - log.stat().st_mtime < LIMIT + SOON


def test_a_rank_that_is_slow_is_no_alarm(tmp_path: Path) -> None:
    slow = run(tmp_path / "run", f"rank=2,step=2,at=optimizer,nth=1,kind=slow,seconds={0.7 * LIMIT}")
    assert (slow.code, slow.message) == (0, "")
    assert slow.seconds > LIMIT


def test_a_rank_that_is_slow_again_and_again_is_named_with_what_it_is_slow_in(tmp_path: Path) -> None:
    sets = {"train.steps": 10, "guard.straggler_interval": 10, "checkpoint.interval": 0}
    folder = tmp_path / "run"
    slow = run_forked(tiny(folder, sets, nproc=4), "rank=1,at=forward,kind=slow,seconds=0.03")
    assert (slow.code, slow.message) == (0, "")
    log = (folder / "logs" / "attempt-001" / "rank-00000.log").read_text()
    assert "rank 1 holds the others up in forward: it takes " in log
