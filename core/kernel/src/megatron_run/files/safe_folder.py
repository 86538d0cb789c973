"""The files of a folder that somebody else may have prepared: a run folder that was unpacked, copied or lent.

Everything that a run reads and writes in its folder goes through here, observers included.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from megatron_run.files.foreign_file import LONGEST, read_open, require_regular
from megatron_run.files.temporary_names import lock_new, remove_left, temporary_name

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def parse_json(content: bytes | str) -> Any:
    """The value in ``content``, JSON that somebody else may have written, after a byte order mark or without.

    Raises ValueError for what is no JSON, and for what is nested deeper than Python reads.
    """
    try:
        return json.loads(content.removeprefix("\ufeff") if isinstance(content, str) else content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _let_go(folder: int) -> None:
    """Close a folder's descriptor: where that fails it is closed all the same, and nothing was written by it."""
    with suppress(OSError):
        os.close(folder)


class SafeFolder:
    """The folder ``path``, below which no link is followed and nothing is opened but regular files.

    A name is relative, as ``logs/attempt-001/rank-00000.log``. Its folders are opened one inside the other, each by the
    descriptor of the one before it, so that what was looked at is what is used. ``path`` itself may lead over links:
    its user chose it. Raises OSError; ELOOP for a link, EINVAL for what is no file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str, limit: int = LONGEST) -> bytes:
        """Return the content of the file ``name``. Raises OSError (EFBIG) for more than ``limit`` bytes."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            return read_open(file, self.path / name, limit)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the mapping in the file ``name``, or None if it cannot be read."""
        try:
            content = parse_json(self.read(name))
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def kept_json(self, name: str) -> dict[str, Any]:
        """Return the mapping in the file ``name``, an empty one where there is no such file.

        For a file that is written anew with all that it held. Raises OSError if it cannot be read (EINVAL: is none).
        """
        try:
            content = parse_json(self.read(name))
        except FileNotFoundError:
            return {}
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise OSError(errno.EINVAL, "it holds no mapping", str(self.path / name))
        return content

    def append(self, name: str) -> BinaryIO:
        """Open the file ``name`` for appending and reading, created if it is missing."""
        return os.fdopen(self.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab+")

    def create(self, name: str, mode: int = 0o644) -> BinaryIO:
        """Create the file ``name`` for writing. Raises FileExistsError if there is anything of that name."""
        return os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")

    def replace(self, name: str, content: bytes) -> None:
        """Write the file ``name`` atomically, so that no reader sees half of it."""
        with self._parent(name) as (folder, last):
            self._refuse_link(folder, last, name)
            remove_left(last, folder)
            temporary = temporary_name(last)
            try:
                with self.create(str(PurePosixPath(name).with_name(temporary))) as file:
                    if not lock_new(file.fileno()):
                        return self.replace(name, content)
                    file.write(content)
                    file.flush()
                    os.replace(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)

    def write_json(self, name: str, content: Any) -> None:
        """Write ``content`` as the file ``name``, atomically; what JSON does not know becomes text."""
        self.replace(name, (json.dumps(content, indent=2, default=str) + "\n").encode())

    def remove(self, name: str) -> None:
        """Remove the file or link ``name``, if it is there."""
        with suppress(FileNotFoundError), self._parent(name) as (folder, last):
            os.unlink(last, dir_fd=folder)

    def remove_all(self, name: str) -> None:
        """Remove the file, link or folder ``name`` with all that lies in it, if it is there."""
        with suppress(FileNotFoundError), self._parent(name) as (folder, last):
            try:
                os.unlink(last, dir_fd=folder)
            except (IsADirectoryError, PermissionError):  # what unlink says of a folder differs between systems
                shutil.rmtree(last, dir_fd=folder)

    def make(self, name: str) -> Path:
        """Create the folder ``name``, and those that it lies in, where they are missing; its path."""
        parts = PurePosixPath(name).parts
        for count in range(1, len(parts) + 1):
            part = "/".join(parts[:count])
            with self._parent(part) as (folder, last):
                with suppress(FileExistsError):
                    os.mkdir(last, dir_fd=folder)
                _let_go(self._enter(folder, last, part))
        return self.path / name

    def open(self, name: str, flags: int, mode: int = 0o644) -> int:
        """Open the regular file ``name`` with ``flags`` of ``os.open``: its descriptor, which no child inherits."""
        with self._parent(name) as (folder, last):
            try:  # O_NONBLOCK: a FIFO must not keep us waiting for whoever is at its other end
                handle = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder)
            except OSError as error:
                raise self._named(error, name) from None
        return require_regular(handle, self.path / name)

    @contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder in which ``name`` lies, and the last part of the name."""
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts:
            raise OSError(errno.EINVAL, "it lies outside of its folder", name)
        *folders, last = path.parts
        handle = os.open(self.path, _FOLDER)
        try:
            for count, part in enumerate(folders, 1):
                outer, handle = handle, self._enter(handle, part, "/".join(folders[:count]))
                _let_go(outer)
            yield handle, last
        except OSError as error:
            if error.errno is None or str(error.filename).startswith(f"{self.path}/"):
                raise
            raise self._named(error, name) from None  # of a call that knows the last part alone, or no name
        finally:
            _let_go(handle)

    def _enter(self, folder: int, part: str, name: str) -> int:
        try:
            return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ENOTDIR:
                self._refuse_link(folder, part, name)
            raise self._named(error, name) from None

    def _refuse_link(self, folder: int, part: str, name: str) -> None:
        with suppress(FileNotFoundError):
            if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
                raise self._named(OSError(errno.ELOOP, ""), name)

    def _named(self, error: OSError, name: str) -> OSError:
        """``error`` with the whole path, and in plain words where it was a link."""
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        return OSError(error.errno, why, str(self.path / name))
