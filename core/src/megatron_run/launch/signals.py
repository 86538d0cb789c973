"""Signals, caught for a while and given back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from megatron_run.errors import ExitCode
from megatron_run.world import StopRequest

_Handler = Callable[[int, FrameType | None], object]


@contextmanager
def caught_signals(*numbers: signal.Signals) -> Iterator[Sequence[int]]:
    """The signals that arrive inside the block, in order. Outside the main thread nothing can be caught."""
    caught: list[int] = []
    with _handling(lambda number, _: caught.append(number), numbers):
        yield caught


@contextmanager
def stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    """SIGTERM lets the step finish and asks to stop; a second one ends the process at once."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.requested is not None:
            os._exit(ExitCode.SIGTERM)
        stop.stop(ExitCode.SIGTERM)

    with _handling(handle, (signal.SIGTERM,)):
        yield


@contextmanager
def _handling(handler: _Handler, numbers: Sequence[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
