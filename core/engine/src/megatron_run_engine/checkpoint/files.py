"""Every touch of the disk. What changes it goes through one small object, so that a test can stop before any change."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from types import TracebackType

from megatron_run.errors import CheckpointError

#: A file system that has no flock answers one of these.
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


#: Bytes after which the disk is set to work on what was written, and after which it is waited for.
_STRETCH, _SYNCED = 1 << 25, 1 << 30
#: Bytes that are read and hashed at once: they stay in the processor's cache.
_AT_ONCE = 1 << 20


class NewFile:
    """A file that did not exist before, open for writing; a link is never followed. OSErrors name the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._handle = os.open(path, flags, 0o644)
        self._written = self._on_its_way = self._on_the_disk = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, all of it."""
        rest = memoryview(data).cast("B")
        with _naming(self.path):
            while rest:
                done = os.write(self._handle, rest)
                rest, self._written = rest[done:], self._written + done
        if self._written - self._on_its_way >= _STRETCH and hasattr(os, "posix_fadvise"):
            # What will not be read again soon is brought to the disk meanwhile, instead of all of it in the sync.
            length = self._written - self._on_its_way
            os.posix_fadvise(self._handle, self._on_its_way, length, os.POSIX_FADV_DONTNEED)
            self._on_its_way = self._written
        if self._written - self._on_the_disk >= _SYNCED:  # a slow disk would keep the last sync waiting for all of it
            self.sync()
            self._on_the_disk = self._written

    def sync(self) -> None:
        """Return once the content is on the disk."""
        with _naming(self.path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class FileSystem:
    """Every change that saving makes to the disk, one method each."""

    def create(self, path: Path) -> NewFile:
        """Make a file; it is an error when there is something of that name."""
        return NewFile(path)

    def make_folder(self, path: Path) -> None:
        """Make a folder; it is an error when there is something of that name."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder a name that nothing has."""
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Put a file in the place of another, in one move."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Return once the names in the folder are on the disk."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with _naming(path):
                os.fsync(handle)
        finally:
            os.close(handle)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all that is in it; links are removed, not followed."""
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(Path(entry.path))
            else:
                self.unlink(Path(entry.path))
        self.remove_folder(path)


@contextmanager
def lock(path: Path, owner: str) -> Iterator[None]:
    """Hold the file ``path`` locked, with ``owner`` in it. Raises :class:`CheckpointError` when somebody else does.

    A dead process gives its lock back. On a file system without flock only the lock of the run folder protects.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                holder = os.read(handle, 200).decode(errors="replace").strip()
                raise CheckpointError(
                    f"checkpoints in {path.parent} are being saved by another job", why=f"run {holder} holds {path}"
                ) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"{owner}\n".encode())
        yield
    finally:
        os.close(handle)


@contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """The regular file ``path``, open for reading.

    Raises :class:`CheckpointError` for one that is missing, a link, or anything else but a file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read", why=why) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} cannot be read", why="it is not a file")
    with os.fdopen(handle, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read", why=error.strerror or str(error)) from error


def size_of(file: BufferedReader) -> int:
    """Length of an open file, in bytes."""
    return os.fstat(file.fileno()).st_size


def unwatched() -> None:
    """Where nobody wants to hear that the work goes on."""


def sha256_of(file: BufferedReader, heartbeat: Callable[[], None] = unwatched) -> str:
    """SHA-256 of an open file, in hexadecimal; ``heartbeat`` hears of each stretch. The disk reads ahead meanwhile."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    total, memory = hashlib.sha256(), memoryview(bytearray(_AT_ONCE))
    while length := file.raw.readinto(memory):
        total.update(memory[:length])
        heartbeat()
    return total.hexdigest()


@contextmanager
def saving(what: str) -> Iterator[None]:
    """Turn an OSError inside the block into a :class:`CheckpointError`: ``what`` failed, on which path, and why."""
    try:
        yield
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        raise CheckpointError(
            what,
            why=f"{error.strerror or error}{place}",
            fix="make room or write access there, and run the same command again",
        ) from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Calls on a descriptor do not know the path."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
