"""Signal handlers that are installed for a while and then given back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType

from megatron_run.errors import ExitCode
from megatron_run_engine.runtime.world import StopRequest

#: Signals that end a run after its step, with the exit code. Schedulers announce a time limit by SIGUSR1.
AFTER_THE_STEP: Mapping[signal.Signals, ExitCode] = MappingProxyType(
    {signal.SIGTERM: ExitCode.SIGTERM, signal.SIGUSR1: ExitCode.TIME_LIMIT}
)

_Handler = Callable[[int, FrameType | None], object]


@contextmanager
def caught_signals(*numbers: signal.Signals) -> Iterator[Sequence[int]]:
    """The signals that arrive inside the block, in order. Python allows handlers in the main thread only."""
    caught: list[int] = []
    with _handling(lambda number, _: caught.append(number), numbers):
        yield caught


@contextmanager
def stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    """A signal of ``AFTER_THE_STEP`` lets the step finish and asks to stop; a second one ends the process at once."""

    def handle(number: int, _frame: FrameType | None) -> None:
        code = AFTER_THE_STEP[signal.Signals(number)]
        if not stop.stop(code):
            os._exit(code)  # no exception: the step that is under way may be waiting in C and never see it

    with _handling(handle, tuple(AFTER_THE_STEP)):
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
