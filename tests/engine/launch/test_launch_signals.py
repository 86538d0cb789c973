"""Signals that arrive while the main thread cannot run a handler."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.signals import SAVING, STARTING, stopping_on_signals
from megatron_run_engine.runtime.world import StopRequest
from tests.support.commands import run_command, started

#: Waits in C for ever, as for a message of another rank: the second lock of a mutex, which no signal interrupts.
DEAF = """
import ctypes, os, signal, threading
from megatron_run_engine.launch.signals import stopping_on_signals
from megatron_run_engine.runtime.world import StopRequest
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
with stopping_on_signals(StopRequest(), tells=True):
    {before}
    library.pthread_mutex_lock(mutex)
"""


@pytest.mark.multiproc
def test_both_ctrl_c_are_answered_while_the_main_thread_waits_in_c(tmp_path: Path) -> None:
    with started((sys.executable, "-c", DEAF.format(before="print('deaf', flush=True)")), tmp_path) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "deaf\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline() == f"{STARTING}\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == ExitCode.SIGINT


@pytest.mark.multiproc
def test_a_second_ctrl_c_right_after_the_first_is_answered_in_c_too(tmp_path: Path) -> None:
    again = "threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()"
    program = DEAF.format(before=f"signal.raise_signal(signal.SIGINT); {again}")
    assert run_command((sys.executable, "-c", program), tmp_path, timeout=30).returncode == ExitCode.SIGINT


def test_a_signal_that_the_main_thread_answers_is_answered_once(capsys: pytest.CaptureFixture[str]) -> None:
    stop = StopRequest()
    stop.begun = True
    with stopping_on_signals(stop, tells=True):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested is ExitCode.SIGINT
        time.sleep(0.5)  # a second answer would end this process
    assert capsys.readouterr().err.count(SAVING) == 1


def test_the_wakeup_of_a_program_is_given_back() -> None:
    before = signal.set_wakeup_fd(-1)
    try:
        with stopping_on_signals(StopRequest()):
            pass
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)
