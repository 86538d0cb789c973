"""Finds processes that a test started and did not end, orphans included."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

#: Helpers of the standard library that live as long as the interpreter that started them.
HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
PROCESSES = Path("/proc")


def end_leftovers(mark: str, patience: float) -> dict[int, str]:
    """Processes with the variable ``mark`` (``NAME=value``) that outlive ``patience`` seconds: pid -> description.

    They are killed, so that they disturb no other test. Empty where the system has no /proc.
    """
    deadline = time.monotonic() + patience
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def marked_processes(mark: str) -> dict[int, str]:
    """Living processes, this one apart, whose environment has ``mark``: pid -> command, and the test it began in."""
    found = {}
    for folder in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's process, or one that ended meanwhile
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
            if mark.encode() in environment and not any(helper in command for helper in HELPERS):
                found[int(folder.name)] = f"{_words(command)} of {_test(environment)}"
    found.pop(os.getpid(), None)
    return found


def _words(command: bytes) -> str:
    return command.replace(b"\0", b" ").decode(errors="replace").strip()[:120]


def _test(environment: list[bytes]) -> str:
    """The test during which the process began, from the variable that pytest keeps."""
    named = (entry.partition(b"=")[2] for entry in environment if entry.startswith(b"PYTEST_CURRENT_TEST="))
    return next(named, b"an unknown test").decode(errors="replace")
