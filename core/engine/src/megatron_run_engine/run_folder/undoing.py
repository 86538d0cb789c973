"""Takes back a start that was refused before its attempt began, so that its folder is as it was before."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_run.errors import ExitCode
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.run_folder.folder import DESCRIPTION, RunFolder

#: How a start ends that was refused: one line says all, and no log more.
REFUSALS = (ExitCode.INPUT, ExitCode.DATA)
#: What the opening of a run's first attempt writes into its folder, beside the lock.
_FIRST = ("status.json", *DESCRIPTION, "logs", "run.json")
_LOCKS = (".lock", ".lock-exclusive")


@dataclass(frozen=True)
class Before:
    """The state of ``path`` before a start.

    ``made`` is the outermost folder that the start has made for it, None for a folder that was there, and ``status``
    the content of its ``status.json``, None without one.
    """

    path: Path
    made: Path | None
    status: bytes | None

    @classmethod
    def of(cls, path: Path, made: Path | None) -> Before:
        """The state of ``path``, a folder that is locked."""
        try:
            return cls(path, made, SafeFolder(path).read("status.json"))
        except OSError:  # there is none, or what no run writes
            return cls(path, made, None)

    def restore(self, folder: RunFolder) -> None:
        """Remove what the start has written for the attempt of ``folder``; what cannot be removed stays.

        The lock is held. That of a folder that was there stays in it: another job may be about to lock it.
        """
        files = SafeFolder(self.path)
        with suppress(OSError):
            if folder.attempt == 1:
                for name in _FIRST:
                    files.remove_all(name)
            else:
                files.remove_all(folder.records)
                if self.status is not None:
                    files.replace("status.json", self.status)
        self.leave()

    def leave(self) -> None:
        """Remove the folder and those around it that the start has made, if nobody has put anything into them."""
        if self.made is None:
            return
        with suppress(OSError):
            for name in _LOCKS:
                SafeFolder(self.path).remove(name)
            for folder in (self.path, *self.path.parents):
                folder.rmdir()
                if folder == self.made:
                    return
