"""The token streams of text files: tokenised once on a machine, kept in the user's cache, and mapped by every rank.

An entry is named after all that its tokens follow from: the contents of the files in their order, the shares of the
splits, the tokenizer, and the code that makes streams. Contents are hashed, not tokenised, to find it; and if
inode, size and times of every file are those of an earlier start, a *link* from these to the entry saves that as well.

    entry    the tokens of train, validation and test | about, as JSON | length and hash of about | magic
    link     the name of the entry

The hash of every ``PIECE`` of the tokens is in ``about``. Opening compares them, in a large entry as many as come to a
gigabyte. A damaged entry is made again. What cannot be written is tokenised in memory, by each rank.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import xxhash

from megatron_run.errors import DataError
from megatron_run.errors.wording import plural
from megatron_run.files.foreign_file import open_file, read_file
from megatron_run.files.publishing import publishing
from megatron_run.files.user_cache import YOUNG, locked, user_cache
from megatron_run_engine.data.documents import Document, Shares, split_streams, token_type
from megatron_run_engine.data.option_types import SPLITS
from megatron_run_engine.data.user_files import unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run.contracts.data import Split
    from megatron_run_engine.data.tokenizer_base import Tokenizer

    Streams = Mapping[Split, NDArray[Any]]

_LOG = logging.getLogger("megatron_run")
#: Less text than this, in bytes, is tokenised in memory at each start: a file would save nothing.
SMALLEST = 2**20
#: Bytes of tokens with a hash of their own, and how many of these are compared when an entry is opened.
PIECE, COMPARED = 2**24, 64
#: Entries that no run has opened for so many days are removed when another one is written.
KEPT_DAYS = 30.0
#: The most bytes of a link, which is a hash.
_LONGEST_LINK = 64
_MAGIC = b"MRTOKEN1"
_END = struct.Struct("<QQ8s")


@dataclass(frozen=True)
class Making:
    """The causes of a text's tokens beside its contents."""

    tokenizer: Tokenizer
    shares: Shares
    cut: bool = False

    @property
    def identity(self) -> str:
        """Equal where all of it is, and the code that makes streams."""
        return repr((self.tokenizer.identity, self.shares, self.cut, _code()))

    def streams(self, contents: Iterable[tuple[object, bytes]]) -> Iterator[tuple[Split, NDArray[Any]]]:
        """The tokens of ``contents``, as :func:`split_streams` yields them."""
        return split_streams(contents, self.tokenizer, self.shares, cut=self.cut)


class _DamagedError(OSError):
    """An entry is not what was written."""


def open_streams(documents: Sequence[Document], tokenizer: Tokenizer, shares: Shares, *, cut: bool = False) -> Streams:
    """Return the token stream of each split, [n], from the cache, where it is written if it is not there.

    ``cut``: documents are cut by the shares, whatever their size. Raises :class:`DataError` for a file that cannot be
    read or is no text for the tokenizer.
    """
    making = Making(tokenizer, shares, cut)
    stats = [_stat(document) for document in documents]
    if sum(each.st_size for each in stats) < SMALLEST:
        return _in_memory(documents, making)
    made_by = making.identity
    try:
        folder = user_cache("tokens")
        files = [
            (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns, document.has_records)
            for each, document in zip(stats, documents, strict=True)
        ]
        link = folder / f"{xxhash.xxh3_128_hexdigest(repr((files, made_by)).encode())}.link"
        with suppress(OSError):
            return _open(_target(link))
        with locked(link.with_suffix(".lock")):
            begun = time.time_ns()
            path = folder / f"{_name(documents, made_by)}.tokens"
            streams = _find_or_write(path, documents, making)
            if begun - max(max(each.st_mtime_ns, each.st_ctime_ns) for each in stats) > YOUNG:
                with publishing(link, durable=False) as (file,):
                    file.write(path.stem.encode())
            return streams
    except OSError as cause:
        _LOG.warning("tokens are kept in memory, by each rank: %s", cause)
        return _in_memory(documents, making)


def _target(link: Path) -> Path:
    """The entry to which ``link`` leads, which is not there where it is damaged. Raises :class:`FileNotFoundError`."""
    try:
        name = read_file(link, _LONGEST_LINK).decode("ascii", "replace")
    except FileNotFoundError:
        raise
    except OSError:
        name = ""
    return link.with_name(f"{name if name.isalnum() else 'damaged'}.tokens")


def _find_or_write(path: Path, documents: Sequence[Document], making: Making) -> Streams:
    try:
        return _open(path)
    except FileNotFoundError:
        pass
    except _DamagedError as cause:
        _LOG.warning("the tokens kept in %s are damaged: %s; tokenising again", path, cause)
    _write(path, documents, making)
    remove_old(KEPT_DAYS)
    return _open(path)


def _stat(document: Document) -> os.stat_result:
    try:
        return document.path.stat()
    except OSError as cause:
        raise unreadable(document.path, cause, "data.paths") from cause


def _code() -> str:
    """The hash of the code that makes streams."""
    here = Path(__file__).parent
    names = ("documents", "tokenizer", "tokenizer_files", "token_cache", "user_files", "lost_text")
    files = [*(here / f"{name}.py" for name in names), *sorted((here / "tokenizer_folder").glob("*.py"))]
    return xxhash.xxh3_128_hexdigest(b"".join(file.read_bytes() for file in files))


def _name(documents: Sequence[Document], made_by: str) -> str:
    """The name of the entry of ``documents`` as they are now."""
    contents = xxhash.xxh3_128(made_by.encode())
    for _, content in chain.from_iterable(each.contents() for each in documents):
        contents.update(xxhash.xxh3_128_digest(content))
    return contents.hexdigest()


def _in_memory(documents: Sequence[Document], making: Making) -> Streams:
    parts: dict[Split, list[NDArray[Any]]] = {split: [np.empty(0, token_type(making.tokenizer))] for split in SPLITS}
    for split, tokens in making.streams(chain.from_iterable(each.contents() for each in documents)):
        parts[split].append(tokens)
    _tell_lost(making.tokenizer.lost)
    return {split: np.concatenate(arrays) for split, arrays in parts.items()}


def _write(path: Path, documents: Sequence[Document], making: Making) -> None:
    """Write the entry ``path``; memory holds a batch of documents. Raises :class:`OSError` if there is no space."""
    contents = xxhash.xxh3_128(making.identity.encode())

    def read() -> Iterator[tuple[str, bytes]]:
        for place, content in chain.from_iterable(each.contents() for each in documents):
            contents.update(xxhash.xxh3_128_digest(content))
            yield place, content

    with publishing(path, durable=False) as (file,), ExitStack() as stack:
        others = [stack.enter_context(TemporaryFile(dir=path.parent)) for _ in SPLITS[1:]]
        files: dict[Split, BinaryIO] = dict(zip(SPLITS, (file, *others), strict=True))
        for split, tokens in making.streams(read()):
            files[split].write(tokens.data)
        if contents.hexdigest() != path.stem:
            raise DataError("the text changed while it was tokenised", origin="data.paths", fix="start again")
        sizes = {split: each.tell() for split, each in files.items()}
        for other in others:
            other.seek(0)
            shutil.copyfileobj(other, file, PIECE)
        file.flush()
        about = {
            "dtype": str(token_type(making.tokenizer)),
            "bytes": sizes,
            "pieces": [xxhash.xxh3_64_hexdigest(piece) for piece in _pieces(_mapped(file))],
            "tokenizer": making.tokenizer.identity,
            "lost": making.tokenizer.lost,
            "text": _title([document.path for document in documents]),
        }
        record = json.dumps(about).encode()
        file.write(record + _END.pack(len(record), xxhash.xxh3_64_intdigest(record), _MAGIC))


def _tell_lost(lost: int) -> None:
    if lost:
        _LOG.warning("data.tokenizer has no token for %s of the text, which are left out", plural(lost, "character"))


def _title(paths: Sequence[Path]) -> str:
    """The text for a list: a file, or how many of them in which folder."""
    if len(paths) == 1:
        return str(paths[0].absolute())
    return f"{plural(len(paths), 'file')} in {os.path.commonpath([path.absolute().parent for path in paths])}"


def _mapped(file: BinaryIO) -> memoryview:
    """The contents of ``file``, mapped read-only."""
    size = os.fstat(file.fileno()).st_size
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def _pieces(content: memoryview) -> Iterator[memoryview]:
    return (content[start : start + PIECE] for start in range(0, len(content), PIECE))


def _about(content: memoryview) -> dict[str, Any]:
    """An entry's description of itself. Raises :class:`_DamagedError` if its end is missing or was changed."""
    if len(content) >= _END.size:
        length, checksum, magic = _END.unpack(content[-_END.size :])
        record = content[max(0, len(content) - _END.size - length) : len(content) - _END.size]
        if magic == _MAGIC and len(record) == length and xxhash.xxh3_64_intdigest(record) == checksum:
            about: dict[str, Any] = json.loads(bytes(record))
            if sum(about["bytes"].values()) + length + _END.size == len(content):
                return about
    raise _DamagedError("its end is missing")


def _open(path: Path) -> Streams:
    """Map an entry. Raises :class:`FileNotFoundError` if there is none, :class:`_DamagedError` if it is damaged."""
    with open_file(path) as file:
        content = _mapped(file)
        with suppress(OSError):  # of another owner, or read-only
            os.utime(path)  # read just now, says `data cache`
    about = _about(content)
    tokens = content[: sum(about["bytes"].values())]
    pieces = list(zip(_pieces(tokens), about["pieces"], strict=True))
    for index in sorted({round(place) for place in np.linspace(0, len(pieces) - 1, min(COMPARED, len(pieces)))}):
        piece, checksum = pieces[index]
        if xxhash.xxh3_64_hexdigest(piece) != checksum:
            raise _DamagedError(f"bytes {index * PIECE} to {index * PIECE + len(piece)} have changed")
    _tell_lost(about.get("lost", 0))
    streams, start = {}, 0
    for split in SPLITS:
        streams[split] = np.frombuffer(tokens[start : start + about["bytes"][split]], about["dtype"])
        start += about["bytes"][split]
    return streams


@dataclass(frozen=True)
class CacheEntry:
    """A file of the cache: ``size`` in bytes, ``days`` since a run opened it, the ``text`` and ``tokenizer`` of it."""

    path: Path
    size: int
    days: float
    text: str
    tokenizer: str


def entries() -> list[CacheEntry]:
    """Return what is kept, what was opened last first. Raises :class:`OSError` without a cache."""
    found = []
    for path in user_cache("tokens").glob("*.tokens"):
        with suppress(FileNotFoundError), open_file(path) as file:  # removed meanwhile
            status = os.fstat(file.fileno())
            try:
                about = _about(_mapped(file))
                description = about["text"], about["tokenizer"]
            except _DamagedError as cause:
                description = f"damaged: {cause}", ""
            found.append(
                CacheEntry(path, status.st_size, max(0.0, time.time() - status.st_mtime) / 86400, *description)
            )
    return sorted(found, key=lambda entry: entry.days)


def remove_old(days: float) -> list[CacheEntry]:
    """Remove the entries that no run has opened for ``days``, and what leads nowhere or was left half-written.

    Return the removed entries. A run that has mapped one keeps it until it ends. Raises :class:`OSError`.
    """
    removed = [entry for entry in entries() if entry.days >= days]
    for entry in removed:
        entry.path.unlink(missing_ok=True)
    folder = user_cache("tokens")
    for link in folder.glob("*.link"):
        with suppress(FileNotFoundError):
            if not _target(link).exists():
                link.unlink()
    for left in chain(folder.glob("*.tmp"), folder.glob("*.lock")):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > 86400 * max(days, 1.0):
                left.unlink()
    return removed
