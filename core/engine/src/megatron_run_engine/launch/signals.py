"""Signal handlers that are installed for a while and then given back."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, MappingProxyType

from megatron_run.errors import ExitCode
from megatron_run.signal_bell import SignalBell
from megatron_run_engine.runtime.world import StopRequest

#: Signals that end a run after its step, with the exit code. Schedulers announce a time limit by SIGUSR1; SIGHUP comes,
#: often twice, from a terminal that is closed.
AFTER_THE_STEP: Mapping[signal.Signals, ExitCode] = MappingProxyType(
    {
        signal.SIGINT: ExitCode.SIGINT,
        signal.SIGTERM: ExitCode.SIGTERM,
        signal.SIGHUP: ExitCode.SIGTERM,
        signal.SIGUSR1: ExitCode.TIME_LIMIT,
    }
)
#: What a person at the terminal reads after the first Ctrl-C in a training: in a step, and before the first one, where
#: ranks that do not attend to signals yet end at once.
SAVING = "Ctrl-C: this step is finished and saved; a second one leaves at once"
STARTING = "Ctrl-C: no step has begun; this ends now, or with the first step, saved; a second one leaves at once"

_Handler = Callable[[int, FrameType | None], object]


@contextmanager
def caught_signals(*numbers: signal.Signals) -> Iterator[Sequence[int]]:
    """The signals that arrive inside the block, in order. Python allows handlers in the main thread only."""
    caught: list[int] = []

    def catch(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not caught:  # the terminal says it twice; nobody types it for want of patience
            caught.append(number)

    with _handling(catch, numbers):
        yield caught


@contextmanager
def stopping_on_signals(stop: StopRequest, *, tells: bool = False, borrowed: bool = False) -> Iterator[None]:
    """A signal of ``AFTER_THE_STEP`` lets the step finish and asks to stop; a second one ends the process at once.

    In a ``borrowed`` process, somebody's program, the second Ctrl-C raises KeyboardInterrupt instead. With ``tells``
    the first one is answered on standard error.
    """

    def answer(number: int) -> None:
        code = AFTER_THE_STEP[signal.Signals(number)]
        if stop.stop(code):
            if tells and code is ExitCode.SIGINT:
                with suppress(RuntimeError, OSError):  # the signal came in the middle of another write
                    print(f"\n{SAVING if stop.begun else STARTING}", file=sys.stderr, flush=True)  # noqa: T201
        elif borrowed and code is ExitCode.SIGINT:
            raise KeyboardInterrupt
        elif number != signal.SIGHUP:
            os._exit(code)  # no exception: the step that is under way may be waiting in C and never see it

    numbers = tuple(AFTER_THE_STEP)
    if borrowed or threading.current_thread() is not threading.main_thread():
        with _handling(lambda number, _: answer(number), numbers):
            yield
        return
    with _SignalThread(answer) as ears, _handling(ears.handle, numbers):
        yield


class _SignalThread(SignalBell):
    """Has each signal answered once: by the main thread, or by another while the main one waits in C."""

    #: Seconds that the main thread has before the other one answers.
    GRACE = 0.2

    def __init__(self, answer: Callable[[int], None]) -> None:
        self._answer = answer
        self._lock = threading.RLock()  # a handler may interrupt a handler
        self._rung: set[int] = set()  # taken from the bell, and not answered yet
        self._owed: set[int] = set()  # answered already; the main thread still hears of them

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The handler of the main thread."""
        with self._lock:
            owed = number in self._owed
            self._owed.discard(number)
            if not owed:
                self._take()
                self._rung.discard(number)  # what rings from now on is another signal, however soon it comes
        if not owed:
            self._answer(number)

    def listen(self) -> None:
        """Answer what the main thread has not answered in time."""
        while self.ear.recv(1, socket.MSG_PEEK):  # it stays until somebody answers
            time.sleep(self.GRACE)
            with self._lock:
                self._take()
                unanswered = self._rung & set(AFTER_THE_STEP)
                self._rung.clear()
                self._owed |= unanswered
            for number in unanswered:
                self._answer(number)

    def _take(self) -> None:
        with suppress(BlockingIOError):  # the bell rings before a handler runs
            self._rung.update(self.ear.recv(64, socket.MSG_DONTWAIT))


@contextmanager
def _handling(handler: _Handler, numbers: Sequence[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hung_up = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup, which means it
    wanted = [number for number in numbers if not (hung_up and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
