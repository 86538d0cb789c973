"""All access to the disk. Changes go through :class:`FileSystem`, so that tests can crash before any one of them."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Protocol

from megatron_run.errors import CheckpointError
from megatron_run.files import foreign_file
from megatron_run_engine.data.user_files import FETCH, PROBE, pointer_fault

#: Errors of file systems without flock.
NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


#: Bytes after which write-back is started, and after which it is awaited.
_WRITE_BACK, _SYNC = 1 << 25, 1 << 30
#: Bytes read and hashed at once: a block stays in the processor's cache.
_BLOCK = 1 << 20
_UNITS = ("B", "kB", "MB", "GB", "TB")


class NewFile:
    """A new file, open for writing. Links are not followed. Every OSError names the path.

    Without ``durable`` it is on a memory file system, where nothing waits for a disk.
    """

    def __init__(self, path: Path, mode: int = 0o644, *, durable: bool = True) -> None:
        self.path, self._durable = path, durable
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._handle = os.open(path, flags, mode)
        self._written = self._write_back = self._synced = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, all of it."""
        rest = memoryview(data).cast("B")
        with _naming(self.path):
            while rest:
                done = os.write(self._handle, rest)  # may write less than asked: signals, or 2 GiB at most on Linux
                rest, self._written = rest[done:], self._written + done
        if not self._durable:
            return
        if self._written - self._write_back >= _WRITE_BACK and hasattr(os, "posix_fadvise"):
            # DONTNEED makes the kernel start write-back of dirty pages now, instead of all of it in the final fsync.
            length = self._written - self._write_back
            os.posix_fadvise(self._handle, self._write_back, length, os.POSIX_FADV_DONTNEED)
            self._write_back = self._written
        if self._written - self._synced >= _SYNC:
            # On a slow disk one final fsync would block for longer than the watchdog's limit without a heartbeat.
            self.sync()
            self._synced = self._written

    def sync(self) -> None:
        """Return once the content is on disk."""
        if self._durable:
            with _naming(self.path):
                os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class FileSystem:
    """The changes that a save makes to the disk, one method each."""

    def create(self, path: Path) -> NewFile:
        """Create a file. Raises OSError if the name exists."""
        return NewFile(path)

    def make_folder(self, path: Path) -> None:
        """Create a folder. Raises OSError if the name exists."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a folder to a name that does not exist."""
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Replace a file by another, atomically."""
        source.replace(target)

    def unlink(self, path: Path, folder: int | None = None) -> None:
        """Remove a file or a link, from the ``folder`` of that descriptor if there is one."""
        with _naming(path):
            os.unlink(path if folder is None else path.name, dir_fd=folder)  # Path knows no descriptors

    def remove_folder(self, path: Path, folder: int | None = None) -> None:
        """Remove an empty folder."""
        with _naming(path):
            os.rmdir(path if folder is None else path.name, dir_fd=folder)

    def sync_folder(self, path: Path) -> None:
        """Return once the names in the folder are on disk: a rename survives a power failure only after this."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with _naming(path):
                os.fsync(handle)
        finally:
            os.close(handle)

    def remove_tree(self, path: Path, folder: int | None = None) -> None:
        """Remove a folder with its contents. Links are removed, not followed, nor what takes a folder's place."""
        name = path if folder is None else path.name
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            with os.scandir(handle) as entries:
                found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
            for inner, is_folder in found:
                (self.remove_tree if is_folder else self.unlink)(path / inner, handle)
        finally:
            os.close(handle)
        self.remove_folder(path, folder)


class MemoryFiles(FileSystem):
    """The same on a memory file system: nothing outlives the machine, so nothing is synced. Its user alone may read."""

    def create(self, path: Path) -> NewFile:
        """Create a file. Raises OSError if the name exists."""
        return NewFile(path, 0o600, durable=False)

    def make_folder(self, path: Path) -> None:
        """Create a folder. Raises OSError if the name exists."""
        path.mkdir(mode=0o700)

    def sync_folder(self, path: Path) -> None:
        """No-op."""


@contextmanager
def lock(path: Path, owner: str) -> Iterator[None]:
    """Hold a lock on the file ``path``, which names ``owner``. Raises :class:`CheckpointError` if another job holds it.

    The operating system releases the lock of a dead process. On a file system without flock there is no lock here, and
    only the lock of the run folder protects.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_FLOCK:
                holder = os.read(handle, 200).decode(errors="replace").strip()
                raise CheckpointError(
                    f"checkpoints in {path.parent} are being saved by another job", why=f"run {holder} holds {path}"
                ) from error
        os.ftruncate(handle, 0)  # only now: until the lock is held, the content names its holder
        os.write(handle, f"{owner}\n".encode())
        yield
    finally:
        with suppress(OSError):  # it is closed whatever the file system says, and nothing of it matters any more
            os.close(handle)


@contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """Open the regular file ``path`` for reading.

    Raises :class:`CheckpointError` if it is missing, a link, a pointer of git-lfs, or anything else but a file.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read", why=why) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} cannot be read", why="it is not a file")
    with os.fdopen(handle, "rb") as file:
        try:
            why = pointer_fault(os.pread(handle, PROBE, 0))
            if why:
                raise CheckpointError(f"{path} is not the file itself", why=why, fix=FETCH)
            yield file
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read", why=error.strerror or str(error)) from error


def read_whole(path: Path, limit: int = 1 << 26) -> bytes:
    """Return the content of the regular file ``path``.

    Raises :class:`CheckpointError` as :func:`reading` does, and for more than ``limit`` bytes: a sparse file may claim
    any length, and who reads JSON has use for some megabytes.
    """
    with reading(path) as file:
        if size_of(file) > limit:
            raise CheckpointError(
                f"{path} is too large", why=f"it has {size_text(size_of(file))}, and {size_text(limit)} are read"
            )
        return file.read(size_of(file))  # never ``limit``: it would be allocated


def followed(path: Path) -> Path:
    """:func:`megatron_run.files.foreign_file.followed` for ``path`` in its folder. Raises :class:`CheckpointError`."""
    try:
        return foreign_file.followed(path.parent, path.name)
    except OSError as error:
        why, fix = error.strerror or str(error), "put the file itself there"
        raise CheckpointError(f"{path} is not read", why=why, fix=fix) from error


def size_of(file: BufferedReader) -> int:
    """Return the length of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def size_text(size: int) -> str:
    """Format a number of bytes: ``950 B``, ``12.3 MB``."""
    amount, unit = float(size), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{size} B"


def no_heartbeat() -> None:
    """Do nothing: the heartbeat of work that no watchdog supervises."""


class Hash(Protocol):
    """A hash that is computed block by block, as hashlib's are."""

    def update(self, data: memoryview, /) -> None:
        """Add the next bytes."""

    def hexdigest(self) -> str:
        """The hash of all bytes so far, in hexadecimal."""


def blocks(size: int) -> int:
    """How often :func:`hash_of` calls its heartbeat for a file of ``size`` bytes."""
    return -(-size // _BLOCK)


def hash_of(file: BufferedReader, total: Hash, heartbeat: Callable[[], None] = no_heartbeat) -> str:
    """Return the hash of an open file, computed by the new ``total``. ``heartbeat`` is called after every block.

    It reads instead of mapping the file: a disk that fails is then an error, and not a signal that ends the process.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # read ahead while we hash
    memory = memoryview(bytearray(_BLOCK))
    while length := file.raw.readinto(memory):
        total.update(memory[:length])
        heartbeat()
    return total.hexdigest()


@contextmanager
def saving(what: str, fix: str = "make room or write access there, and run the same command again") -> Iterator[None]:
    """Turn an OSError within the block into a :class:`CheckpointError`: ``what`` failed, on which path, and why."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(what, why=reason(error), fix=fix) from error


def reason(error: OSError) -> str:
    """Why something could not be written, and where."""
    place = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{place}"


@contextmanager
def finding_memory() -> Iterator[None]:
    """Turn a MemoryError within the block into an OSError: files of a memory file system find no more there either."""
    try:
        yield
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError within the block: calls on a descriptor do not know it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
