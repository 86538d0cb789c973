"""The processes that prepare data: what they hear of signals is theirs alone."""

from __future__ import annotations

import signal
import socket

import pytest

from megatron_run.errors import DataError
from megatron_run_data_indexed.preparation.workers import Workers

pytestmark = pytest.mark.multiproc


def say_what_signals_do(_: int) -> None:
    ends = [signal.getsignal(number).name for number in (signal.SIGTERM, signal.SIGHUP)]  # type: ignore[union-attr]
    raise DataError(f"{signal.set_wakeup_fd(-1)} {' '.join(ends)}")


def test_a_worker_neither_rings_the_bell_of_the_program_nor_runs_its_handlers() -> None:
    """Else the program would take the end of a worker for its own."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    ear, bell = socket.socketpair()
    with ear, bell:
        bell.setblocking(False)
        before = [signal.signal(number, lambda *_: None) for number in numbers]
        rung = signal.set_wakeup_fd(bell.fileno())
        try:
            with (
                pytest.raises(DataError, match=r"^-1 SIG_DFL SIG_DFL$"),
                Workers[int](1, say_what_signals_do) as workers,
            ):
                list(workers.map([0]))
        finally:
            signal.set_wakeup_fd(rung)
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)
