"""What a rank prints: how it goes to its log, and what the launcher reads there."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from megatron_run_engine.run_folder.folder import open_log


def redirect_output(log: Path) -> None:
    """Make ``log`` this process's descriptors 1 and 2."""
    flush_output()
    descriptor = open_log(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def flush_output() -> None:
    """Write what is printed and not yet written, if anybody still takes it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def last_log_line(log: Path, window: int = 8192) -> str:
    """The last line of ``log`` that is not empty, as far as its last ``window`` bytes tell."""
    try:
        with os.fdopen(open_log(log, os.O_RDONLY), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - window))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def count_warnings(log: Path) -> tuple[int, str]:
    """How many lines of ``log`` are warnings, and the first of them."""
    try:
        with os.fdopen(open_log(log, os.O_RDONLY), encoding="utf-8", errors="replace") as lines:
            found = [line.strip() for line in lines if "Warning:" in line or line.startswith(("WARNING", "warning:"))]
    except OSError:
        return 0, ""
    return len(found), found[0] if found else ""
