"""Signal handlers that are installed for a while and then given back."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, MappingProxyType

from megatron_run.errors import ExitCode
from megatron_run_engine.runtime.world import StopRequest

#: Signals that end a run after its step, with the exit code. Schedulers announce a time limit by SIGUSR1.
AFTER_THE_STEP: Mapping[signal.Signals, ExitCode] = MappingProxyType(
    {signal.SIGINT: ExitCode.SIGINT, signal.SIGTERM: ExitCode.SIGTERM, signal.SIGUSR1: ExitCode.TIME_LIMIT}
)
#: What a person at the terminal reads after the first Ctrl-C.
SAVING = "Ctrl-C: this step is finished and saved; a second one leaves at once"

_Handler = Callable[[int, FrameType | None], object]


@contextmanager
def caught_signals(*numbers: signal.Signals) -> Iterator[Sequence[int]]:
    """The signals that arrive inside the block, in order. Python allows handlers in the main thread only."""
    caught: list[int] = []
    with _handling(lambda number, _: caught.append(number), numbers):
        yield caught


@contextmanager
def stopping_on_signals(stop: StopRequest, *, tells: bool = False, borrowed: bool = False) -> Iterator[None]:
    """A signal of ``AFTER_THE_STEP`` lets the step finish and asks to stop; a second one ends the process at once.

    In a ``borrowed`` process, somebody's program, the second Ctrl-C raises KeyboardInterrupt instead. With ``tells``
    the first one is answered on standard error.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        code = AFTER_THE_STEP[signal.Signals(number)]
        if stop.stop(code):
            if tells and code is ExitCode.SIGINT:
                with suppress(RuntimeError, OSError):  # the signal came in the middle of another write
                    print(f"\n{SAVING}", file=sys.stderr, flush=True)  # noqa: T201
        elif borrowed and code is ExitCode.SIGINT:
            raise KeyboardInterrupt
        else:
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
