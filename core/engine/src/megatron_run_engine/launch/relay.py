"""Shows one rank's log on the terminal while it grows."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

#: Seconds between two looks at the log: a progress bar moves ten times a second at most.
_INTERVAL = 0.05


def terminal_writer() -> Callable[[bytes], None]:
    """Write bytes to standard output: unbuffered to its descriptor, else as text (a notebook has none)."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return lambda data: print(data.decode(errors="replace"), end="", flush=True)  # noqa: T201  # the only way there

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    sys.stdout.flush()
    return write


class Relay:
    """Copies ``log`` to ``write`` from a thread. When nobody reads any more (EPIPE), training goes on unseen."""

    def __init__(self, log: Path, write: Callable[[bytes], None]) -> None:
        self._log, self._write = log, write
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def finish(self, within: float = 2.0) -> None:
        """Copy what is left and end; a terminal that does not take it in time is left alone."""
        self._ended.set()
        self._thread.join(within)

    def _run(self) -> None:
        try:
            with self._log.open("rb") as log:
                while not self._ended.is_set():
                    self._copy(log.read())
                    self._ended.wait(_INTERVAL)
                self._copy(log.read())
        except (OSError, ValueError):
            return

    def _copy(self, data: bytes) -> None:
        if data:
            self._write(data)
