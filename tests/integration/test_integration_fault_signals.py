"""Signals in the midst of what a run does: the step is finished and saved, or what was saved before stays."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.support.forked import ForkedRun, Ran, learned, run_forked, saved_bits, tiny
from tests.support.processes import wait_until

pytestmark = pytest.mark.multiproc

LAST = 6


def request(folder: Path) -> Any:
    return tiny(folder, {"train.steps": LAST, "checkpoint.interval": 3}, nproc=2)


def signalled(folder: Path, held: str, *numbers: signal.Signals) -> Ran:
    """Send signals while rank 1 is ``held`` at a phase."""
    with ForkedRun(request(folder), f"rank=1,{held},kind=slow") as run:
        log = folder / "logs" / "attempt-001" / "rank-00001.log"
        wait_until(lambda: log.exists() and "fault: slow" in log.read_text())
        for number in numbers:
            run.signal(number)
            time.sleep(0.2)  # the second of two that wait to be delivered is no signal
        return run.wait()


def newest(folder: Path) -> int | None:
    checkpoints = Checkpoints(folder / "checkpoints")
    step = checkpoints.newest()
    if step is not None:
        checkpoints.verify(step)
    return step


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run_forked(request(folder)).code == 0
    return folder


@pytest.mark.parametrize(
    ("number", "code", "held", "saved"),
    [
        (signal.SIGTERM, 143, "step=2,at=backward,nth=1,seconds=0.5", 2),
        # test_launch_local has its code, and SIGTERM is handled alike
        pytest.param(signal.SIGUSR1, 75, "step=2,at=backward,nth=1,seconds=0.5", 2, marks=pytest.mark.nightly),
        (signal.SIGTERM, 143, "step=3,at=save-shard,seconds=0.5", 4),
    ],
    ids=["in a step", "SIGUSR1", "during a save"],
)
def test_a_signal_lets_the_step_finish_and_saves_it(
    number: signal.Signals, code: int, held: str, saved: int, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stopped = signalled(folder, held, number)
    assert (stopped.code, stopped.message) == (code, f"stopped by {number.name}")
    assert newest(folder) == max(learned(folder)) == saved
    assert f"step {saved} is saved: to resume from it, run the same command" in stopped.told
    assert run_forked(request(folder)).code == 0
    assert saved_bits(folder, LAST) == saved_bits(whole, LAST)
    assert learned(folder) == learned(whole)


def test_a_second_signal_ends_at_once_and_the_last_commit_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = signalled(folder, "step=5,at=backward,seconds=30", signal.SIGTERM, signal.SIGTERM)
    assert ended.code == 143
    assert ended.seconds < 20  # the step would have taken thirty
    assert newest(folder) == 3


def test_ranks_that_only_one_signal_reaches_stop_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped = run_forked(request(folder), "rank=1,step=2,at=forward,kind=term")
    assert stopped.code == 143
    assert newest(folder) == max(learned(folder)) == 2
