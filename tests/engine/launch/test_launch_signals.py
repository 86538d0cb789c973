"""Signals that arrive while the main thread cannot run a handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.signals import SAVING, STARTING, stopping_on_signals
from megatron_run_engine.runtime.world import StopRequest

#: Waits in C for ever, as for a message of another rank: the second lock of a mutex, which no signal interrupts.
DEAF = """
import ctypes
from megatron_run_engine.launch.signals import stopping_on_signals
from megatron_run_engine.runtime.world import StopRequest
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with stopping_on_signals(StopRequest(), tells=True):
    print("deaf", flush=True)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
"""


@pytest.mark.multiproc
def test_both_ctrl_c_are_answered_while_the_main_thread_waits_in_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DEAF], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "deaf\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline() == f"{STARTING}\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == ExitCode.SIGINT


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
