"""Ids of an indexed dataset outside of its vocabulary: found before a step, by the file and the byte."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from megatron_run.errors import DataError
from megatron_run.files.user_cache import YOUNG, locked, user_cache
from megatron_run_engine.data.indexed_files import tokens_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run_engine.data.indexed_files import IndexedReader

#: The most bytes of tokens that are read before a step: some seconds. Of more, as many are read, evenly spread.
MOST = 2**33
#: Tokens that are compared at once.
_PIECE = 2**20


def check_ids(reader: IndexedReader, vocab_size: int | None, most: int | None = None) -> tuple[int, int]:
    """Read the tokens of ``reader``, or ``most`` bytes of them in evenly spread pieces; return the least and highest.

    Raises :class:`DataError`, with file and byte offset, for an id that is negative or not below ``vocab_size``.
    """
    low, high = [], []
    path, width = tokens_path(reader.prefix), reader.dtype.itemsize
    for start in _places(len(reader.tokens), None if most is None else most // width):
        # Not through the map: pages that it has read would count as memory of this process.
        tokens = np.fromfile(path, reader.dtype, _PIECE, offset=start * width)
        low.append(int(tokens.min()))
        high.append(int(tokens.max()))
        if low[-1] < 0 or (vocab_size is not None and high[-1] >= vocab_size):
            wrong = tokens < 0 if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)
            place = start + int(np.flatnonzero(wrong)[0])
            raise DataError(
                f"token {reader.tokens[place]} at byte {place * width} of {path} is outside of the vocabulary",
                why="ids are not negative" if vocab_size is None else f"it has {vocab_size} ids",
                fix="name the tokenizer that made it, or prepare it again",
            )
    return min(low, default=0), max(high, default=0)


def _places(count: int, most: int | None) -> list[int]:
    """Where pieces of ``count`` tokens begin: all of them, or so many evenly spread ones as ``most`` tokens take."""
    pieces = -(-count // _PIECE)
    chosen = pieces if most is None else min(pieces, max(1, most // _PIECE))
    return [_PIECE * int(piece) for piece in np.linspace(0, pieces - 1, chosen).round()] if pieces else []


def require_ids(readers: Sequence[IndexedReader], vocab_size: int) -> None:
    """Raise :class:`DataError` as :func:`check_ids` does for ``MOST`` bytes of ``readers``, with data.paths as origin.

    Each has its share of these bytes. What was found right is noted in the user's cache, so that later starts, and
    other ranks of this one, read nothing.
    """
    sizes = [reader.tokens.nbytes for reader in readers]
    for reader, size in zip(readers, sizes, strict=True):
        _require(reader, vocab_size, size if sum(sizes) <= MOST else MOST * size // sum(sizes))


def _require(reader: IndexedReader, vocab_size: int, most: int) -> None:
    limits = np.iinfo(reader.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    try:
        mark = _mark(reader, vocab_size, most)
        with locked(mark.with_suffix(".lock")):
            if not mark.exists():
                _check(reader, vocab_size, most)
                if time.time_ns() - _changed(reader) > YOUNG:
                    mark.touch()
    except OSError:  # no cache here
        _check(reader, vocab_size, most)


def _check(reader: IndexedReader, vocab_size: int, most: int) -> None:
    try:
        check_ids(reader, vocab_size, most)
    except DataError as error:
        error.origin = "data.paths"
        error.fix = "set data.tokenizer, or data.vocab_size, to that of the tokenizer that made it, or prepare it again"
        raise


def _changed(reader: IndexedReader) -> int:
    status = tokens_path(reader.prefix).stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)


def _mark(reader: IndexedReader, vocab_size: int, most: int) -> Path:
    """The file whose presence says that so many bytes of the tokens, as the file system knows them now, were right."""
    status = tokens_path(reader.prefix).stat()
    file = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    identity = repr((file, reader.dtype.str, vocab_size, most))
    return user_cache("checked-ids") / xxhash.xxh3_128_hexdigest(identity.encode())
