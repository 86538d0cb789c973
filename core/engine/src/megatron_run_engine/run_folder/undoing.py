"""Takes back a start that was refused before its attempt began, so that its folder is as it was before."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_run.errors import ExitCode
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.run_folder.folder import DESCRIPTION, RunFolder

#: How a start ends that was refused: one line says all, and no log more.
REFUSALS = (ExitCode.INPUT, ExitCode.DATA)
#: What the opening of a run's first attempt writes into its folder, beside the lock and ``run.json``.
_FIRST = ("status.json", *DESCRIPTION, "logs")
_LOCKS = (".lock", ".lock-exclusive")


@dataclass(frozen=True)
class Before:
    """The state of ``path`` before a start.

    ``made`` is the outermost folder that the start has made for it, None for a folder that was there, and ``status``
    the content of its ``status.json``, None without one.
    """

    path: Path
    made: Path | None
    status: bytes | None = None

    def with_status(self) -> Before:
        """The state of a folder that is locked by now."""
        try:
            return replace(self, status=SafeFolder(self.path).read("status.json"))
        except OSError:  # there is none, or what no run writes
            return self

    def restore(self, folder: RunFolder) -> None:
        """Remove what the start has written for the attempt of ``folder``; what cannot be removed stays.

        The lock is held. That of a folder that was there stays in it: another job may be about to lock it.
        """
        files = SafeFolder(self.path)
        if folder.attempt == 1:
            _forget_first(files)
        else:
            _removed(files, folder.records)
            with suppress(OSError):
                if self.status is not None:
                    files.replace("status.json", self.status)
        self.leave(locked=True)

    def leave(self, *, locked: bool) -> None:
        """Remove the folder and those around it that the start has made, if nobody has put anything into them.

        What locks it is this start's to remove where it has ``locked`` the folder, else another's.
        """
        if self.made is None:
            return
        with suppress(OSError):
            for name in _LOCKS if locked else ():
                SafeFolder(self.path).remove(name)
            for folder in (self.path, *self.path.parents):
                if os.path.lexists(folder):  # the last of them could not be made
                    folder.rmdir()
                if folder == self.made:
                    return


def _forget_first(files: SafeFolder) -> None:
    """Remove what a run's first attempt has written.

    Where something stays, as an open log does on NFS, so does a ``run.json`` without attempts, which any start takes
    over: without that file it would be no run folder, and with the attempt one of which nothing is known.
    """
    with suppress(OSError):
        files.write_json("run.json", files.kept_json("run.json") | {"attempts": []})
    left = [name for name in _FIRST if not _removed(files, name)]
    if not left:
        _removed(files, "run.json")


def _removed(files: SafeFolder, name: str) -> bool:
    """Remove ``name``; whether it is gone."""
    with suppress(OSError):
        files.remove_all(name)
        return True
    return False
