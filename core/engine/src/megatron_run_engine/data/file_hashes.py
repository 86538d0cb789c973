"""What the files of a run's data hold, as one hash, so that a run does not go on with other data.

A file is read once on a machine, by the first of its ranks; the user's cache keeps the hash by device, inode, size and
times.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash

from megatron_run.errors import DataError
from megatron_run.foreign_file import open_file, read_file
from megatron_run_engine.data.user_cache import YOUNG, keep, locked, user_cache

_LOG = logging.getLogger(__name__)

#: Bytes up to which a file is read whole, in seconds to minutes. Of a larger one as much is read, evenly spread.
WHOLE = 64 << 30
#: Bytes that are read at once, up to how many no hash is kept, and from how many on it is told that this takes a while.
_PIECE, _SMALL, _LONG = 16 << 20, 16 << 20, 8 << 30


def hash_of(files: Sequence[Path]) -> str | None:
    """The 128-bit XXH3 of the contents of ``files`` in their order; None without files.

    It names neither folders nor times: copied files have the same. Raises :class:`DataError` for one that cannot be
    read.
    """
    total = xxhash.xxh3_128()
    for path in files:
        try:
            total.update(_kept_hash(path).encode())
        except OSError as cause:
            raise DataError(f"{path} cannot be read", why=cause.strerror or str(cause)) from cause
    return total.hexdigest() if files else None


def _kept_hash(path: Path) -> str:
    stat = path.stat()
    if stat.st_size < _SMALL:
        return _hash(path, stat.st_size)
    name = xxhash.xxh3_128_hexdigest(
        repr((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, WHOLE)).encode()
    )
    try:
        kept = user_cache("hashes") / name
        with locked(kept.with_name("lock")):
            if kept.is_file() and len(found := read_file(kept, 64).decode("ascii")) == 32:
                return found
            begun, found = time.time_ns(), _hash(path, stat.st_size)
            if begun - max(stat.st_mtime_ns, stat.st_ctime_ns) > YOUNG and _unchanged(path, stat):
                keep(kept, found.encode())
            return found
    except (OSError, UnicodeDecodeError):
        return _hash(path, stat.st_size)  # without a cache each rank reads it


def _unchanged(path: Path, before: os.stat_result) -> bool:
    now = path.stat()
    return (now.st_size, now.st_mtime_ns, now.st_ctime_ns) == (before.st_size, before.st_mtime_ns, before.st_ctime_ns)


def _hash(path: Path, size: int) -> str:
    if size > _LONG:
        _LOG.info("reading %.0f GiB of %s, to know the data again", min(size, WHOLE) / 2**30, path)
    total = xxhash.xxh3_128(str(size).encode())
    with open_file(path) as file:
        for piece in _pieces(file, size):
            total.update(piece)
    return total.hexdigest()


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """All of ``file``, or as many evenly spread pieces as make ``WHOLE``, its first and last among them."""
    count, most = -(-size // _PIECE), WHOLE // _PIECE
    for place in range(min(count, most)):
        file.seek((place if count <= most else place * (count - 1) // (most - 1)) * _PIECE)
        yield file.read(_PIECE)
