"""What a rank prints: to its log, and to nobody once a plugin has closed it."""

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
