"""One hash of all that the files of a run's data hold, so that a run does not go on with other data, and one of each.

Of files that lie as they lay, by path, inode, size and times, the user's cache has the hashes. Others are read once on
a machine: the ranks that come later wait.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from megatron_run.errors import DataError
from megatron_run.files.foreign_file import open_file, read_file
from megatron_run.files.user_cache import YOUNG, cached, keep

#: Bytes up to which a file is read whole, in seconds to minutes. Of a larger one as much is read, evenly spread.
WHOLE = 64 << 30
#: Bytes that are read at once, and from how many on it is told that this takes a while.
_PIECE, _LONG = 16 << 20, 8 << 30
#: Hexadecimal digits of a hash.
_DIGITS = 32
#: Seconds between two looks at a lock.
_LOOK = 0.2


class Hashes(NamedTuple):
    """The 128-bit XXH3 of the sizes and contents of files in their order, and of the contents of ``each``."""

    total: str
    each: tuple[str, ...]


def contents_hash(
    files: Sequence[Path],
    alive: Callable[[], object] = lambda: None,
    tell: Callable[[str], object] = lambda _: None,
) -> Hashes | None:
    """The hashes of the contents of ``files``; None without files.

    Copied files have the same. ``alive`` is called while this goes on, and ``tell`` with a line where it takes minutes.
    Raises :class:`DataError` for a file that cannot be read.
    """
    if not files:
        return None
    try:
        stats = [(path, path.stat()) for path in files]
        kept = _place(stats)
        return _hash(stats, alive, tell) if kept is None else _kept_hash(kept, stats, alive, tell)
    except OSError as cause:
        raise DataError(f"{cause.filename or files[0]} cannot be read", why=cause.strerror or str(cause)) from cause


_Stats = Sequence[tuple[Path, os.stat_result]]


def _kept_hash(kept: Path, stats: _Stats, alive: Callable[[], object], tell: Callable[[str], object]) -> Hashes:
    with _alone(kept.with_suffix(".lock"), alive):
        found = _found(kept, len(stats))
        if found is None:
            begun, found = time.time_ns(), _hash(stats, alive, tell)
            if not _may_change(stats, begun):
                with suppress(OSError):  # a cache that is full
                    keep(kept, "\n".join((found.total, *found.each)).encode())
    return found


def _place(stats: _Stats) -> Path | None:
    """Where the hash of files that lie so is kept; None without a cache. A device has another number on each host."""
    lie = [(str(path.resolve()), each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for path, each in stats]
    return cached("hashes", f"{xxhash.xxh3_128_hexdigest(repr((lie, WHOLE)).encode())}.hash")


def _found(kept: Path, count: int) -> Hashes | None:
    try:
        total, *each = read_file(kept, (count + 2) * (_DIGITS + 1)).decode("ascii").split("\n")
    except (OSError, UnicodeDecodeError):
        return None
    sound = len(each) == count and all(len(digest) == _DIGITS for digest in (total, *each))
    return Hashes(total, tuple(each)) if sound else None


def _may_change(stats: _Stats, begun: int) -> bool:
    """Whether a file has changed since it was looked at, or could unseen, as its last change was a moment ago."""
    for path, before in stats:
        now = path.stat()
        changed = max(now.st_mtime_ns, now.st_ctime_ns)
        as_before = (now.st_size, now.st_mtime_ns, now.st_ctime_ns) == (
            before.st_size,
            before.st_mtime_ns,
            before.st_ctime_ns,
        )
        if not as_before or abs(begun - changed) < YOUNG:
            return True
    return False


@contextmanager
def _alone(lock: Path, alive: Callable[[], object]) -> Iterator[None]:
    """Hold ``lock``, for which others wait, alive; at once on a file system without locks, or that is full."""
    try:
        file = lock.open("w", encoding="ascii")
    except OSError:
        yield
        return
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alive()
                time.sleep(_LOOK)
                continue
            except OSError:
                pass
            break
        yield


def _hash(stats: _Stats, alive: Callable[[], object], tell: Callable[[str], object]) -> Hashes:
    size = sum(min(each.st_size, WHOLE) for _, each in stats)
    if size > _LONG:
        tell(f"reading {size / 2**30:.0f} GiB of data once, so that a run which goes on knows them again")
    total, found = xxhash.xxh3_128(), []
    for path, each in stats:
        own = xxhash.xxh3_128()
        total.update(f"{each.st_size} ".encode())
        with open_file(path) as file:
            for piece in _pieces(file, each.st_size):
                total.update(piece)
                own.update(piece)
                alive()
        found.append(own.hexdigest())
    return Hashes(total.hexdigest(), tuple(found))


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """All of ``file``, or as many evenly spread pieces as make ``WHOLE``, its first and last among them."""
    count, most = -(-size // _PIECE), WHOLE // _PIECE
    for place in range(min(count, most)):
        file.seek((place if count <= most else place * (count - 1) // (most - 1)) * _PIECE)
        yield file.read(_PIECE)
