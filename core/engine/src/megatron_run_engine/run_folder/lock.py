"""The lock of a run folder: one job at a time writes into it."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from types import TracebackType

from megatron_run.errors import InputError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.checkpoint.files import NO_FLOCK

#: How often a lock is tried that is held, and the seconds between: a fifth of a second in all.
_TRIES, _PAUSE = 11, 0.02


class FolderLock:
    """The lock of a run folder, held from the constructor until ``release`` or the end of the ``with`` block.

    ``path/.lock`` is locked with flock, which the operating system releases when the process dies. On file systems
    without flock a file created with O_EXCL serves as the lock. Raises :class:`InputError` naming the holder if another
    job holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path / ".lock"
        self._exclusive = path / ".lock-exclusive"
        self._handle: int | None = None
        self._owns_file = False
        self._acquire()

    def _acquire(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        held, created = False, not os.path.lexists(self._path)
        handle = os.open(self._path, flags | os.O_NONBLOCK, 0o644)
        try:
            self._lock(handle)
            held = True
            os.ftruncate(handle, 0)  # only now: until the lock is held, the content names its holder
            os.write(handle, _process_name())
        except BaseException:
            if held and created:  # as on a full disk; a new folder is empty again
                self._path.unlink(missing_ok=True)
            os.close(handle)
            self._remove_exclusive()
            raise
        self._handle = handle

    def release(self) -> None:
        """Release the lock. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):  # a close that fails has closed, and nobody needs what was in the file
                os.close(handle)  # .lock itself stays: a job that waits on a removed file would lock nothing
        self._remove_exclusive()

    def _remove_exclusive(self) -> None:
        if self._owns_file:
            self._owns_file = False
            self._exclusive.unlink(missing_ok=True)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _lock(self, handle: int) -> None:
        try:
            _try_for_a_moment(handle)
        except BlockingIOError:
            raise self._in_use(self._path, "wait for it or choose another run.folder") from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            self._make_exclusive()  # unlike flock it survives a killed process, so the refusal says what to delete

    def _make_exclusive(self) -> None:
        try:
            handle = os.open(self._exclusive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            fix = f"if that process is gone, delete {self._exclusive}"
            raise self._in_use(self._exclusive, fix) from None
        self._owns_file = True
        os.write(handle, _process_name())
        os.close(handle)

    def _in_use(self, holder: Path, fix: str) -> InputError:
        who = SafeFolder(holder.parent).read(holder.name).decode(errors="replace").strip() or "another process"
        return InputError(f"run folder {self._path.parent} is in use", why=f"{who} writes into it", fix=fix)


def _try_for_a_moment(handle: int) -> None:
    """Lock: whoever only looks whether a job runs holds the lock too, but not for long. Raises BlockingIOError."""
    for _ in range(_TRIES - 1):
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_PAUSE)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _process_name() -> bytes:
    return f"process {os.getpid()} on {gethostname()}\n".encode()
