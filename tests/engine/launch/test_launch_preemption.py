"""What still fits before a machine is taken, and a file that asks for the end."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.preemption import preempted
from megatron_run_engine.runtime import world
from megatron_run_engine.runtime.world import StopRequest
from tests.support.processes import wait_until


class Clock:
    """A clock that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(world, "monotonic", lambda: self.now)

    def one_step(self, stop: StopRequest, step: int, seconds: float) -> None:
        stop.begin_step(step)
        stop.read()
        self.now += seconds
        stop.end_step()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("within", "elapsed", "save", "fits"),
    [(9, 0, 0, False), (11.5, 0, 0, True), (11.5, 0, 3, False), (9, 4, 0, True), (9, 4, 3, False), (5, 30, 3, True)],
)
def test_a_step_fits_if_the_last_one_says_so(
    clock: Clock, within: float, elapsed: float, save: float, fits: bool
) -> None:
    """A step takes 10 s; a second of the limit is for leaving."""
    stop = StopRequest(within=within)
    clock.one_step(stop, 1, 10)
    stop.save_seconds = save
    stop.begin_step(2)
    clock.now += elapsed
    stop.stop(ExitCode.SIGTERM)
    assert stop.step_fits is fits


def test_who_asks_after_a_step_has_answered_waits_for_the_next_one(clock: Clock) -> None:
    stop = StopRequest(within=15)
    clock.one_step(stop, 1, 10)
    stop.begin_step(2)
    clock.now += 9
    assert stop.read() is None
    stop.stop(ExitCode.SIGTERM)
    assert stop.step_fits, "one second and ten, of 14"
    stop.save_seconds = 5
    assert not stop.step_fits
    stop.end_step()
    assert stop.step_fits, "what is saved now is not given up for the next step"
    stop.begin_step(3)
    assert stop.read() is ExitCode.SIGTERM


def test_nothing_is_too_long_before_anything_was_measured_or_without_a_limit(clock: Clock) -> None:
    new, free = StopRequest(within=5), StopRequest()
    for stop in (new, free):
        stop.begin_step(1)
        stop.stop(ExitCode.SIGTERM)
        assert stop.step_fits
        assert stop.save_fits
    clock.one_step(free, 1, 1e6)
    free.begin_step(2)
    assert free.step_fits


def watched(stop: StopRequest, notice: Path | None, folder: Path, seconds: float = 5.0) -> list[tuple[int, str]]:
    """With which code and line the thread leaves within ``seconds``; empty where it does not."""
    left: list[tuple[int, str]] = []
    over = threading.Event()

    def leave(code: ExitCode, line: str) -> None:
        left.append((int(code), line))
        over.set()

    with preempted(stop, notice, folder, leave, lambda _: None):
        over.wait(seconds)
    return left


def test_a_process_leaves_when_its_time_is_over_and_names_the_step_that_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step7").mkdir(parents=True)
    stop = StopRequest(within=0.4)
    stop.begin_step(9)
    stop.stop(ExitCode.TIME_LIMIT)
    assert watched(stop, None, tmp_path) == [
        (75, "stopped by the time limit: run.stop_within=0.4 s is over in step 9; step 7 is saved")
    ]


def test_a_process_leaves_at_once_when_its_step_cannot_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = StopRequest(within=30)
    clock = Clock(monkeypatch)
    clock.one_step(stop, 1, 60)
    stop.begin_step(2)
    stop.stop(ExitCode.SIGTERM)
    ((code, line),) = watched(stop, None, tmp_path)
    assert code == 143
    assert line.endswith("are too short for the rest of a step and a save: step 2 is left undone; no step is saved")


def test_a_file_that_appears_asks_for_the_end_and_one_that_was_there_does_not(tmp_path: Path) -> None:
    notice, stop = tmp_path / "notice", StopRequest()
    notice.write_text("of an earlier machine")
    hour_ago = time.time_ns() - 3600 * 10**9
    os.utime(notice, ns=(hour_ago, hour_ago))
    with preempted(stop, notice, tmp_path, lambda *_: None, lambda _: None):
        time.sleep(1.3)
        assert stop.requested is None
        os.utime(notice, ns=(1, 1))
        wait_until(lambda: stop.requested is ExitCode.SIGTERM)
    new = StopRequest()
    with preempted(new, tmp_path / "other", tmp_path, lambda *_: None, lambda _: None):
        (tmp_path / "other").touch()
        wait_until(lambda: new.requested is ExitCode.SIGTERM)
    early = StopRequest()  # it came while the run started
    with preempted(early, tmp_path / "other", tmp_path, lambda *_: None, lambda _: None):
        wait_until(lambda: early.requested is ExitCode.SIGTERM)


def test_a_signal_that_follows_the_file_is_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes a machine says so, and then sends SIGTERM: the step is still finished and saved."""
    monkeypatch.setenv("HOME", str(tmp_path))
    stop = StopRequest()

    def tell(line: str) -> None:
        raise BrokenPipeError(line)

    with preempted(stop, Path("~/notice"), tmp_path, lambda *_: None, tell):
        (tmp_path / "notice").touch()
        wait_until(lambda: stop.requested is ExitCode.SIGTERM)
    assert stop.stopped_by(ExitCode.SIGTERM) == f"{tmp_path / 'notice'} (run.stop_file)"
    assert stop.stop(ExitCode.SIGTERM)
    assert not stop.stop(ExitCode.SIGTERM), "a second one ends the process"


def test_no_thread_looks_where_nothing_is_asked(tmp_path: Path) -> None:
    before = threading.active_count()
    with preempted(StopRequest(), None, tmp_path, lambda *_: None, lambda _: None):
        assert threading.active_count() == before
