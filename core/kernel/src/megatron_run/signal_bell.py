"""Signals that are heard at once, by a thread: Python runs handlers between two instructions of the main thread alone.

The main thread may wait in C as long as a message of another rank takes, or a library's training.
"""

from __future__ import annotations

import signal
import socket
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class SignalBell(ABC):
    """Within its context each signal that has a handler of Python's is also a byte, its number, at :attr:`ear`.

    A thread of its own listens there. Only the main thread may enter it.
    """

    #: Ends (``recv`` gives no bytes) once the context has ended.
    ear: socket.socket

    @abstractmethod
    def listen(self) -> None:
        """Hear signals at :attr:`ear` until it ends, in the thread."""

    def __enter__(self) -> Self:
        self.ear, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._before = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self.listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._before)
        self._bell.close()  # ends the thread
        self._thread.join()
        self.ear.close()
