"""A start that is killed while it opens its run folder and begins, before any one of its changes to the disk."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron_run.planning import ResolvedRun
from megatron_run_engine.run_folder import open_run_folder

#: What changes names or contents on the disk, as Python's audit events call it.
_CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.symlink", "os.truncate"})


def killed_before(count: int, run: ResolvedRun, counted: int | None = None) -> bool:
    """Open the folder, and begin, in a child that is killed before its change number ``count``; whether it did both.

    If so, it writes the number of its changes to the descriptor ``counted``.
    """
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
        if counted is not None:
            os.write(counted, str(count - left).encode())
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 0


def goes_on_after(count: int, run: ResolvedRun, folder: Path, attempts: int) -> bool:
    """After ``attempts`` in ``folder`` one is killed before its change ``count``; whether the next is counted right."""
    shutil.rmtree(folder, ignore_errors=True)
    for _ in range(attempts):
        _opened(run)
    killed_before(count, run)
    attempt = _opened(run)
    listed = json.loads((folder / "run.json").read_text())["attempts"]
    return len(listed) == attempt in (attempts + 1, attempts + 2)


def _opened(run: ResolvedRun) -> int:
    """Open the folder of ``run``, begin and leave it; the number of the attempt."""
    opened = open_run_folder(run)
    opened.folder.begin(0)
    opened.lock.release()
    return opened.folder.attempt


def changes_of(run: ResolvedRun, folder: Path, attempts: int) -> int:
    """The number of changes that a start makes after ``attempts`` in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    for _ in range(attempts):
        _opened(run)
    reader, writer = os.pipe()
    try:
        assert killed_before(sys.maxsize, run, writer), "nobody kills it"
        return int(os.read(reader, 20))
    finally:
        os.close(reader)
        os.close(writer)
