"""How a command ends that is told to: as after an error, so that what it has begun is undone, and in one line."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from megatron_run.errors import ExitCode, ToldToEnd
from megatron_run.signal_bell import SignalBell
from megatron_run_cli.streams import erase

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(ToldToEnd):
    """The signal ``number`` came."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Within: SIGTERM and SIGHUP raise :class:`Terminated` in the main thread; a second one ends the process at once.

    For commands that are no ranks; where one starts some, their launcher's handlers stand meanwhile. SIGHUP stays
    ignored where it is, as nohup wants it. Only the main thread may set handlers; in any other nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    with _Deadline(numbers) as deadline:

        def handle(number: int, _: FrameType | None) -> NoReturn:
            deadline.met.set()
            for each in numbers:
                signal.signal(each, signal.SIG_DFL)
            raise Terminated(number)

        deadline.handler = handle
        try:
            for number in numbers:
                signal.signal(number, handle)
            yield
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_kept() -> Iterator[None]:
    """Within: a signal that would raise waits for the end of the block, in the main thread; a second ends the process.

    A library that is interrupted while it is loaded may hide that, and be broken: torch goes on without NumPy.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    came: list[int] = []

    def keep(number: int, _: FrameType | None) -> None:
        came.append(number)
        for each in handlers:
            signal.signal(each, signal.SIG_DFL)

    for number in handlers:
        signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for first in came:
            handlers[signal.Signals(first)](first, None)


class _Deadline(SignalBell):
    """Ends the process if a signal came and the main thread, which waits in C, runs no handler and sets no ``met``.

    A signal that another ``handler`` has taken over meanwhile, as that of ranks, is none of its business.
    """

    #: Seconds that the main thread has, and that it has after a second signal.
    GRACE, AT_ONCE = 3.0, 0.2

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self._numbers = numbers
        self.met = threading.Event()
        self.handler: Callable[[int, FrameType | None], NoReturn] | None = None

    def __exit__(self, *error: Any) -> None:
        self.met.set()
        super().__exit__(*error)

    def listen(self) -> None:
        """Wait for a signal, and then as long as the main thread may take."""
        first = self._hear()
        if first is None or self.met.wait(self.AT_ONCE):
            return
        self.ear.settimeout(self.GRACE)
        with suppress(TimeoutError):
            self._hear()  # a second one
        if not self.met.wait(self.AT_ONCE):
            erase()
            with suppress(OSError):
                os.write(2, f"megatron-run: {Terminated(first)}\n".encode())
            os._exit(ExitCode.SIGTERM)

    def _hear(self) -> int | None:
        """The next of the signals that end a command, None once the bell is closed."""
        while heard := self.ear.recv(1):
            if heard[0] in self._numbers and (self.met.is_set() or signal.getsignal(heard[0]) is self.handler):
                return heard[0]
        return None
