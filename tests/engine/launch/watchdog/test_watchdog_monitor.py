"""Time as the watchdog counts it: by its own looks, so that a machine that was asleep accuses nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_run.contracts.activity import Activity
from megatron_run_engine.launch.watchdog.monitor import Watchdog, is_stopped
from megatron_run_engine.launch.watchdog.page import PageWriter
from tests.support.processes import wait_until

LIMIT = 5.0


class Site:
    """Two ranks of this process under a watchdog whose clock the test moves."""

    def __init__(self, folder: Path) -> None:
        self.now, self.halted = 100.0, False
        self.ranks = [Activity(), Activity()]
        paths = [folder / f"page-{rank}" for rank in range(2)]
        for activity, path in zip(self.ranks, paths, strict=True):
            activity.members["world"] = (0, 1)
            PageWriter(path, activity)
            activity.step(1)
            activity.enter("optimizer")
        self.watchdog = Watchdog(paths, LIMIT, clock=lambda: self.now, stopped=lambda process: self.halted)
        self.wait(0.2)

    def wait(self, seconds: float, *, working: int | None = None, look: float = 0.2) -> str | None:
        """Let time pass while rank ``working`` goes on; what the watchdog says first, and after how long."""
        end = self.now + seconds
        while self.now < end:
            self.now += look
            if working is not None:
                self.ranks[working].enter("forward", self.now)
            if (error := self.watchdog.look()) is not None:
                return str(error)
        return None


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_silent_rank_is_named_within_the_limit_and_two_seconds(site: Site) -> None:
    site.ranks[0].collective("all-reduce", "world", 4).__enter__()
    site.ranks[1].enter("backward", "B0.0")
    before = site.now
    assert (site.wait(LIMIT + 2) or "").startswith("rank 1 hangs")
    assert LIMIT - 0.1 <= site.now - before <= LIMIT + 1
    assert site.watchdog.age == pytest.approx(site.now - before, abs=0.5), "how long it took to see, for the record"


def test_a_rank_that_says_something_new_now_and_then_is_not_named(site: Site) -> None:
    site.ranks[0].collective("all-reduce", "world", 4).__enter__()
    for _ in range(4):
        site.ranks[1].enter("backward", "B0.0")
        assert site.wait(LIMIT - 0.5) is None


def test_who_is_let_go_after_a_long_wait_is_no_alarm_unless_it_stays(site: Site) -> None:
    site.ranks[0].collective("all-reduce", "world", 4).__enter__()
    for _ in range(4):
        site.ranks[1].enter("backward", "B0.0")
        assert site.wait(LIMIT - 0.5) is None
    site.ranks[1].collective("all-reduce", "world", 4).__enter__()
    assert site.wait(LIMIT / 4) is None, "the first has not noticed yet that the second has come"
    assert "hangs" in (site.wait(LIMIT + 1) or "")


def test_a_watchdog_that_was_held_up_itself_accuses_nobody(site: Site) -> None:
    assert site.wait(1000, look=1000.0) is None
    assert site.wait(LIMIT - 1.5) is None


def test_a_stopped_rank_is_called_that(site: Site) -> None:
    site.halted = True
    assert "is stopped by a signal" in (site.wait(LIMIT + 1, working=0) or "")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(not Path("/proc").exists(), reason="what a process is doing is read from /proc")
def test_a_stopped_process_is_told_from_one_that_sleeps_or_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeper.pid))
    sleeper.kill()
    sleeper.wait()
    assert not is_stopped(sleeper.pid)
