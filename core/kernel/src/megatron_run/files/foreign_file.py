"""A file that somebody names, and somebody else may have made: opened at once where it is one, read within a limit.

A FIFO would keep its reader waiting, a device and a hole have no end, and a link in a folder that came from elsewhere
may lead to a file of the reader's. So every such file is opened here, or below a :class:`SafeFolder`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

#: The most bytes that are read of one file at once, unless a caller knows better: far more than any record has.
LONGEST = 1 << 26


def require_regular(handle: int, path: Path) -> int:
    """Return ``handle``, the descriptor of ``path``. Raises OSError, and closes it, where that is no regular file."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is not a file", str(path))


def open_file(path: Path) -> BinaryIO:
    """Open the regular file ``path``, or that to which it is a link, for reading. Raises OSError."""
    # O_NONBLOCK: not to wait for the other end of a FIFO
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(require_regular(handle, path), "rb")


def read_open(file: BinaryIO, path: Path, limit: int = LONGEST) -> bytes:
    """Return the content of ``path``, open as ``file``. Raises OSError (EFBIG) for more than ``limit`` bytes."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise _too_large(path, size, limit)
    return file.read(size)  # never ``limit``: it would be allocated


def read_file(path: Path, limit: int = LONGEST) -> bytes:
    """Return the content of the regular file ``path``. Raises OSError, with EFBIG for more than ``limit`` bytes."""
    with open_file(path) as file:
        return read_open(file, path, limit)


def check_file(path: Path, limit: int | None = None) -> None:
    """Raise OSError as :func:`read_file` does, before a library opens ``path`` itself."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
    if limit is not None and size > limit:
        raise _too_large(path, size, limit)


def _too_large(path: Path, size: int, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"it has {size} bytes, and at most {limit} are read", str(path))


def followed(folder: Path, name: str) -> Path:
    """The file that ``name``, in a folder of another program's, stands for: itself, or what it is a link to.

    Links may lead within the folder and, from a snapshot in Hugging Face's cache, to the cache's blobs. Others would
    bring files of the user's into what somebody has prepared, and out with it. Raises OSError (ELOOP).
    """
    path, home = folder / name, folder.resolve()
    target = path.resolve()
    blobs = home.parent.with_name("blobs") if home.parent.name == "snapshots" else home
    if not any(target.is_relative_to(each) for each in (home, blobs)):
        why = f"it is a symbolic link to {target}, outside of its folder"
        raise OSError(errno.ELOOP, why, str(path))
    return target
