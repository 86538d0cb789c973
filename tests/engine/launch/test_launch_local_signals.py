"""Signals to the local launcher: what its ranks are told, and how long they get."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.job import RankTask
from megatron_run_engine.launch.signals import SAVING, STARTING
from megatron_run_engine.launch.start import spawn
from tests.engine.launch.launcher import Launcher, no_process_left, send_when
from tests.support.processes import on_signals

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(60)]


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, ExitCode.SIGTERM), (signal.SIGUSR1, ExitCode.TIME_LIMIT), (signal.SIGHUP, ExitCode.SIGTERM)],
)
def test_a_polite_signal_is_forwarded_and_has_its_code(
    launcher: Launcher, number: signal.Signals, code: ExitCode
) -> None:
    with on_signals(signal.SIG_DFL, number):
        sender = send_when(launcher.ready, number)
        result = launcher("*:polite")
        sender.join()
    assert (result.code, result.message) == (code, f"stopped by {number.name}")


def test_an_interrupt_within_the_first_imports_of_a_rank_waits(tmp_path: Path) -> None:
    """Python would raise it there: with a traceback, and lost where an import swallows it."""
    up, attends = tmp_path / "up", "from megatron_run_engine.launch.start import heed_interrupts; heed_interrupts()"
    imports = f"import pathlib, time; pathlib.Path({str(up)!r}).touch(); time.sleep(0.5)"
    rank = spawn([sys.executable, "-c", f"{imports}; {attends}; time.sleep(50)"], os.environ, tmp_path / "log", ())
    while not up.exists():
        time.sleep(0.01)
    rank.send_signal(signal.SIGINT)
    assert rank.wait() == -signal.SIGINT
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_polite_signal_ranks_get_as_long_as_their_step_takes(
    launcher: Launcher, number: signal.Signals
) -> None:
    """Longer than the others get once a rank has failed."""
    sender = send_when(launcher.ready, number)
    launcher("*:polite 3.0", grace=0.2)
    sender.join()
    assert [launcher.log(rank) for rank in range(2)] == ["the step is done\n"] * 2


@pytest.mark.parametrize(
    ("doing", "task", "told"),
    [
        ("polite", None, [STARTING]),
        ("page wait", None, [SAVING]),  # in step 3
        ("polite", RankTask("an evaluation"), []),  # saves nothing, and has no step to finish
    ],
)
def test_ctrl_c_is_answered_with_what_becomes_of_the_step(
    launcher: Launcher, doing: str, task: RankTask | None, told: list[str]
) -> None:
    sender = send_when(launcher.ready, signal.SIGINT)
    launcher(f"*:{doing}", task=task)
    sender.join()
    assert launcher.told == told


def test_a_terminal_that_hangs_up_twice_lets_the_step_finish(launcher: Launcher) -> None:
    with on_signals(signal.SIG_DFL, signal.SIGHUP):
        sender = send_when(launcher.ready, signal.SIGHUP, signal.SIGHUP)
        result = launcher("*:polite 1.5")
        sender.join()
    assert result.code == ExitCode.SIGTERM
    assert [launcher.log(rank) for rank in range(2)] == ["the step is done\n"] * 2


def test_a_launcher_under_nohup_does_not_hear_that_its_terminal_hangs_up(launcher: Launcher) -> None:
    with on_signals(signal.SIG_IGN, signal.SIGHUP):
        sender = send_when(launcher.ready, signal.SIGHUP, signal.SIGTERM)
        result = launcher("*:polite")
        sender.join()
    assert (result.code, result.message) == (ExitCode.SIGTERM, "stopped by SIGTERM")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_at_once(launcher: Launcher, number: signal.Signals) -> None:
    sender = send_when(launcher.ready, number, number)
    result = launcher("*:stubborn", grace=50.0)
    sender.join()
    assert result.code == 128 + number
    assert no_process_left(launcher)
