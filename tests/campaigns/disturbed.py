"""A command in a process that is killed, told to end, or finds its disk full, at a change of the disk that is chosen.

Changes are what Python does below the folder of a trial: names that are made, given and removed, writes, and syncs.
"""

from __future__ import annotations

import errno
import io
import os
import pkgutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.forked import MEGATRON_RUN

#: How a process is told what befalls it, where, below which folder, and where it counts.
HOW, AT, BELOW, COUNT = "DISTURBED_HOW", "DISTURBED_AT", "DISTURBED_BELOW", "DISTURBED_COUNT"
#: What changes names or contents, as Python's audit events call it, and what only frees room.
_FREES = frozenset({"os.remove", "os.rmdir"})
_CHANGES = frozenset({"os.mkdir", "os.rename", "os.symlink", "os.link", "os.truncate"}) | _FREES
_WRITES = os.O_CREAT | os.O_WRONLY | os.O_RDWR


class Disturbance:
    """Befalls this process, and none that it forks, before its change number ``at``."""

    def __init__(self, how: str, at: int, below: str, count: str) -> None:
        self._how, self._at, self._below, self._done = how, at, os.path.realpath(below), 0
        self._pid = os.getpid()
        self._count = os.open(count, os.O_WRONLY | os.O_CREAT, 0o644)
        self._write = os.pwrite

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """See what Python is about to do."""
        if event in _CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES):
            self.change(event, arguments[0])

    def change(self, event: str, place: object) -> None:
        """See a change of ``place``, a path or a descriptor. Raises OSError where the disk is full."""
        if os.getpid() != self._pid or not self._is_below(place):
            return
        self._done += 1
        self._write(self._count, str(self._done).encode(), 0)
        if self._how == "full" and self._done >= self._at and event not in _FREES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._how.startswith("SIG") and self._done == self._at:
            os.kill(self._pid, signal.Signals[self._how])

    def _is_below(self, place: object) -> bool:
        if isinstance(place, int):
            try:
                place = Path(f"/proc/self/fd/{place}").readlink()
            except OSError:
                return False
        path = Path.cwd() / os.fsdecode(place)  # type: ignore[arg-type]
        return path.is_relative_to(self._below)


class _Seen(io.FileIO):
    """A file whose writes are seen."""

    see: Callable[[str, object], None]

    def write(self, data: Any, /) -> int:
        self.see("write", self.fileno())
        return super().write(data)


def _opening(see: Callable[[str, object], None]) -> Callable[..., Any]:
    real = io.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, *others: Any, **named: Any) -> Any:
        if not set(mode) & set("wax+") or buffering == 0:
            return real(file, mode, buffering, *others, **named)
        raw = _Seen(file, mode.replace("b", "").replace("t", ""), named.pop("closefd", True), named.pop("opener", None))
        raw.see = see
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *others, **named)

    return opened


def program() -> None:
    """``megatron-run``, disturbed as the environment says."""
    how, at, below, count = (os.environ.pop(name) for name in (HOW, AT, BELOW, COUNT))
    disturbance = Disturbance(how, int(at), below, count)
    sys.dont_write_bytecode = True
    tempfile.tempdir = None  # the server's own
    time.strftime = lambda *_: "2026-01-01T00:00:00+0000"  # what is written names the day
    for name in ("write", "fsync"):
        real = getattr(os, name)

        def seen(handle: int, *others: Any, real: Callable[..., Any] = real, name: str = name) -> Any:
            disturbance.change(name, handle)
            return real(handle, *others)

        setattr(os, name, seen)
    io.open = _opening(disturbance.change)
    sys.addaudithook(disturbance.audit)
    pkgutil.resolve_name(MEGATRON_RUN)()
