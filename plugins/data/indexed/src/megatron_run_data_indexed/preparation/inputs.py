"""The files of a preparation, and the blocks into which they are cut.

A block is what one process reads at a time: lines of a plain file, which that process seeks itself; unpacked lines of a
compressed one, which only one process can unpack; or a row group of a Parquet file. Where blocks begin and end follows
from the files alone, so that a later start finds the same ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from megatron_run.errors import DataError, InputError, near_path
from megatron_run_engine.data.user_files import (
    LARGEST_UNPACKED,
    MAGIC,
    Compression,
    compression_of,
    foreign,
    start_of,
    unpacked,
)

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Format = Literal["jsonl", "text", "parquet"]

#: The formats by the end of a name, without the end of a compressed file.
ENDINGS: dict[str, Format] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    ".parquet": "parquet",
}
_CHUNK = 2**20
#: The most bytes of one document in a compressed file.
LARGEST_RECORD = LARGEST_UNPACKED


@dataclass(frozen=True)
class Input:
    """A file: what it holds, and how it is compressed. ``size`` in bytes and ``changed`` in nanoseconds identify it."""

    path: Path
    format: Format
    compression: Compression
    size: int
    changed: int


@dataclass(frozen=True)
class Block:
    """Bytes ``start`` to ``stop`` of a file, or ``content`` unpacked from them; of Parquet, row group ``start``."""

    number: int
    source: Input
    start: int
    stop: int
    content: bytes | None = None

    @property
    def consumed(self) -> int:
        """Bytes of the file for which this block stands."""
        if self.source.format == "parquet":
            return self.source.size // max(self.stop, 1)  # one of `stop` row groups
        return self.stop - self.start


def find_inputs(names: Sequence[str], form: Format | None = None) -> tuple[list[Input], int]:
    """Return the inputs of ``names``, in their order and sorted within a folder, and how many files were left out.

    A name is a file, a pattern, or a folder, of which files with a known ending count, hidden ones excepted.
    Raises :class:`DataError` for a name that matches nothing, and for a file that is empty, unreadable or something
    else than its name says; :class:`InputError` for an ending that tells nothing, unless ``form`` says what it is.
    """
    found: dict[Path, Input] = {}
    left_out = 0
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            paths = [Path(folder, file) for folder, _, files in os.walk(path) for file in files]
            visible = [each for each in paths if not any(part.startswith(".") for part in each.relative_to(path).parts)]
            known = [each for each in visible if form or _kind(each)[0]]
            left_out += len(visible) - len(known)
            if not known:
                raise DataError(f"folder {path} holds no file to prepare", why=f"names end in {', '.join(ENDINGS)}")
        elif not path.exists() and has_magic(name):
            known = [Path(match) for match in glob(str(path), recursive=True) if Path(match).is_file()]  # noqa: PTH207
            if not known:
                raise DataError(f"{name} matches no file")
        else:
            known = [path]
        for each in sorted(known, key=lambda path: path.parts):
            found.setdefault(each.resolve(), _input(each, form))
    return list(found.values()), left_out


def _kind(path: Path) -> tuple[Format | None, Compression]:
    compression = compression_of(path)
    inner = Path(path.stem) if compression else path
    return ENDINGS.get(inner.suffix.lower()), compression


def _input(path: Path, form: Format | None) -> Input:
    known, compression = _kind(path)
    if (form or known) is None and path.exists():
        raise InputError(
            f"{path} does not say what it holds", why=f"names end in {', '.join(ENDINGS)}", fix="add --format"
        )
    try:
        status, start = path.stat(), start_of(path)
    except FileNotFoundError as cause:
        raise DataError(f"{path} does not exist", fix=near_path(path)) from cause
    except OSError as cause:
        raise DataError(f"{path} cannot be read", why=cause.strerror or str(cause)) from cause
    source = Input(path, form or known or "text", compression, status.st_size, status.st_mtime_ns)
    _check_start(source, start)
    return source


def _check_start(source: Input, start: bytes) -> None:
    """Check that a file begins as its name says."""
    if not start:
        raise DataError(f"{source.path} is empty")
    if source.compression:
        if not start.startswith(MAGIC[source.compression]):
            raise DataError(f"{source.path} is no .{source.compression} file", why="it begins otherwise")
        return
    if source.format == "parquet":
        if start[:4] == b"PARE":
            raise DataError(f"{source.path} is encrypted", why="its footer is", fix="decrypt it")
        if start[:4] != b"PAR1":
            raise DataError(f"{source.path} is no Parquet file", why="it begins otherwise")
        return
    if what := foreign(start):
        raise DataError(f"{source.path} is no {source.format} file", why=what.why, fix=what.fix)


class Separator:
    """What ends a document of a text: ``text``, each line feed of which may have a carriage return before it."""

    def __init__(self, text: bytes) -> None:
        unix = text.replace(b"\r\n", b"\n")
        self._pattern = re.compile(re.escape(unix).replace(b"\\\n", b"\r?\n"))
        #: The most bytes that it takes, and all bytes that are in it.
        self.longest = len(unix) + unix.count(b"\n")
        self._bytes = unix + b"\r" * (b"\n" in unix)

    def split(self, content: bytes) -> list[bytes]:
        """The documents of ``content``; after a separator at its end there is none."""
        found: list[bytes] = self._pattern.split(content)
        return found if found[-1] else found[:-1]

    def first_end(self, content: bytes | bytearray, start: int) -> int:
        """Where the first separator in ``content`` from ``start`` on ends; -1 without one."""
        found = self._pattern.search(content, start)
        return found.end() if found else -1

    def apart(self, content: bytes) -> int:
        """The last place in ``content`` that no separator reaches over, since the byte before is in none; 0 without."""
        return len(content.rstrip(self._bytes))

    def last_end(self, content: bytes | bytearray, start: int) -> int:
        """Where the last separator in ``content`` from ``start`` on ends; -1 without one."""
        return max((found.end() for found in self._pattern.finditer(content, start)), default=-1)


def separator_of(source: Input, separator: bytes | None) -> Separator | None:
    """What ends a record of ``source``: a line's end, or what ends a text's documents, None for one in each file."""
    if source.format == "jsonl":
        return Separator(b"\n")
    return None if separator is None else Separator(separator)


def blocks(inputs: Sequence[Input], separator: bytes | None, size: int) -> Iterator[Block]:
    """Yield the blocks of all ``inputs`` in order, each of about ``size`` bytes. ``separator`` ends documents of texts.

    Raises :class:`DataError` for a file that ends too early or cannot be unpacked.
    """
    number = 0
    for source in inputs:
        if source.format == "parquet":
            groups = open_parquet(source.path).num_row_groups
            cuts: Iterator[tuple[int, int, bytes | None]] = ((group, groups, None) for group in range(groups))
        elif source.compression:
            cuts = _unpacked(source, separator_of(source, separator), size)
        else:
            cuts = ((start, stop, None) for start, stop in _ranges(source, separator_of(source, separator), size))
        for start, stop, content in cuts:
            yield Block(number, source, start, stop, content)
            number += 1


def _ranges(source: Input, separator: Separator | None, size: int) -> Iterator[tuple[int, int]]:
    """The byte ranges of a plain file, each but the last ending with a ``separator``."""
    if separator is None:
        yield 0, source.size
        return
    start = 0
    with source.path.open("rb") as file:
        while start < source.size:
            stop = (
                source.size
                if start + size >= source.size
                else _after(file, separator, start, start + size, source.size)
            )
            yield start, stop
            start = stop


def _after(file: BinaryIO, separator: Separator, begun: int, place: int, end: int) -> int:
    """The offset after the first ``separator`` that ends at ``place`` or later; ``end`` if there is none.

    Separators are found from left to right, and in a run of line feeds it matters where that begins: at ``begun``,
    behind another one, or anywhere that no separator reaches over. So documents do not depend on the size of blocks.
    """
    start, stop = begun, max(begun, place - separator.longest)
    while stop > begun:
        low = max(begun, stop - _CHUNK)
        file.seek(low)
        apart = separator.apart(file.read(stop - low))
        if apart:
            start = low + apart
            break
        stop = low
    file.seek(start)
    content = bytearray()
    while chunk := file.read(_CHUNK):
        content += chunk
        searched = 0
        while (found := separator.first_end(content, searched)) >= 0:
            if start + found >= place:
                return start + found
            searched = found
        searched = max(searched, len(content) - separator.longest + 1)  # no other one begins before
        del content[:searched]
        start += searched
    return end


def _unpacked(source: Input, separator: Separator | None, size: int) -> Iterator[tuple[int, int, bytes]]:
    """The contents of a compressed file in pieces that end with a ``separator``, and the bytes that each came from."""
    waiting, start = bytearray(), 0
    looked, searched = 0, 0  # how much was there, and from where a separator may begin
    for chunk, read in unpacked(source.path, source.compression):
        waiting += chunk
        if len(waiting) > LARGEST_RECORD:
            raise DataError(
                f"{source.path} unpacks to more than {LARGEST_RECORD >> 20} MiB without an end of a document",
                fix="unpack it to see what it is; --separator says what ends a document of a text",
            )
        if separator is None or len(waiting) < max(size, looked + _CHUNK // 2):
            continue
        cut = separator.last_end(waiting, searched)
        looked, searched = len(waiting), max(0, len(waiting) - separator.longest + 1)
        if cut >= 0:
            place = min(read, source.size)
            yield start, place, bytes(waiting[:cut])
            start, looked, searched = place, 0, 0
            del waiting[:cut]
    if waiting:
        yield start, source.size, bytes(waiting)


def open_parquet(path: Path) -> ParquetFile:
    """Open a Parquet file. Raises :class:`DataError` if it is damaged or the library is missing."""
    try:
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as cause:
        raise missing(f"{path} needs the library pyarrow", "parquet") from cause
    with _naming(path):
        return ParquetFile(path)


def read_batches(path: Path, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield ``batches`` of the Parquet file ``path``. Raises :class:`DataError` where it is damaged."""
    with _naming(path):
        yield from batches


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the Parquet file ``path`` in what the library raises: OSError, ValueError, and errors of its own of both."""
    try:
        yield
    except (OSError, ValueError) as cause:
        raise DataError(f"{path} is damaged", why=(str(cause).splitlines() or [""])[0]) from cause


def missing(what: str, extra: str) -> DataError:
    """The error of a library that ``extra`` brings."""
    return DataError(what, fix=f"pip install 'megatron-run-data-indexed[{extra}]'")
