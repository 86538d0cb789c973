"""One job at a time in a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from socket import gethostname
from types import TracebackType

from megatron_run.errors import InputError

#: A file system that has no flock answers one of these.
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FolderLock:
    """Holds a folder from its making until ``release``, or as a context manager until the block ends.

    ``path/.lock`` is locked with flock, which a dead process gives back, else a file made with O_EXCL stands for the
    lock. Raises :class:`InputError` naming the holder when another job has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path / ".lock"
        self._exclusive = path / ".lock-exclusive"
        self._handle: int | None = None
        self._owns_file = False
        self._acquire()

    def _acquire(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self._path, flags, 0o644)
        try:
            self._lock(handle)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        os.ftruncate(handle, 0)
        os.write(handle, _whoami())

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if self._owns_file:
            self._exclusive.unlink(missing_ok=True)
            self._owns_file = False

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(self._path, "wait for it or choose another run.folder") from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            self._make_exclusive()

    def _make_exclusive(self) -> None:
        try:
            handle = os.open(self._exclusive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            fix = f"if that process is gone, delete {self._exclusive}"
            raise self._in_use(self._exclusive, fix) from None
        self._owns_file = True
        os.write(handle, _whoami())
        os.close(handle)

    def _in_use(self, holder: Path, fix: str) -> InputError:
        who = holder.read_text(encoding="utf-8", errors="replace").strip() or "another process"
        return InputError(f"run folder {self._path.parent} is in use", why=f"{who} writes into it", fix=fix)


def _whoami() -> bytes:
    return f"process {os.getpid()} on {gethostname()}\n".encode()
