"""A start that is killed while it opens its run folder and begins, before any one of its changes to the disk."""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron_run.planning import ResolvedRun
from megatron_run_engine.run_folder import open_run_folder

#: What changes names or contents on the disk, as Python's audit events call it.
_CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.symlink", "os.truncate"})


def killed_before(count: int, run: ResolvedRun) -> bool:
    """Open the folder, and begin, in a child that is killed before its change number ``count``; whether it did both."""
    child = os.fork()
    if child == 0:
        left = count

        def kill(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_CREAT | os.O_RDWR)
            if event in _CHANGES or writes:
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(kill)
        try:
            open_run_folder(run).folder.begin(0)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 0
