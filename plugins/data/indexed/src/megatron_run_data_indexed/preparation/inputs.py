"""The files of a preparation, and the blocks into which they are cut.

A block is what one process reads at a time: lines of a plain file, which that process seeks itself; unpacked lines of a
compressed one, which only one process can unpack; or row groups of a Parquet file. Where blocks begin and end follows
from the files alone, so that a later start finds the same ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path
from typing import BinaryIO, Literal

from megatron_run.errors import DataError, InputError
from megatron_run.errors.wording import near_path
from megatron_run.files.foreign_file import open_file
from megatron_run_data_indexed.preparation.parquet_file import row_groups
from megatron_run_engine.data.indexed_files import belongs_to_dataset
from megatron_run_engine.data.user_files import (
    LARGEST,
    LARGEST_LINE,
    MAGIC,
    Compression,
    compression_of,
    foreign,
    start_of,
    unpacked,
)

Format = Literal["jsonl", "text", "parquet"]

#: The formats by the end of a name, without the end of a compressed file.
ENDINGS: dict[str, Format] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    ".parquet": "parquet",
}
_CHUNK = 2**20
#: The most bytes of one record, by the format: a hole in a plain file, and packed zeros, are one of any length.
LARGEST_RECORD: dict[Format, int] = {"jsonl": LARGEST_LINE, "text": LARGEST}


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
    """Bytes ``start`` to ``stop`` of a file, or ``content`` unpacked from them; of Parquet, its ``groups`` of rows."""

    number: int
    source: Input
    start: int
    stop: int
    content: bytes | None = None
    groups: range = range(0)

    @property
    def consumed(self) -> int:
        """Bytes of the file for which this block stands."""
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
            known = [each for each in visible if (form or _kind(each)[0]) and not belongs_to_dataset(each)]
            left_out += len(visible) - len(known)
            if not known:
                raise DataError(f"folder {path} holds no file to prepare", why=f"names end in {', '.join(ENDINGS)}")
        elif not path.exists() and has_magic(name):
            matches = map(Path, glob(str(path), recursive=True))  # noqa: PTH207
            known = [each for each in matches if each.is_file() and not belongs_to_dataset(each)]
            if not known:
                raise DataError(f"{name} matches no file")
        else:
            known = [path]
        for each in sorted(known, key=lambda path: path.parts):
            found.setdefault(each.resolve(), _input(each, form))
    return list(found.values()), left_out


def is_text(name: str, form: Format | None = None) -> bool:
    """Whether a file called ``name`` may hold texts: its ending says so, or ``form`` does."""
    return not Path(name).name.startswith(".") and bool(form or _kind(Path(name))[0])


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
    """The end of a document of a text: ``text``, each line feed of which may have a carriage return before it."""

    def __init__(self, text: bytes) -> None:
        unix = text.replace(b"\r\n", b"\n")
        self._pattern = re.compile(re.escape(unix).replace(b"\\\n", b"\r?\n"))
        #: The most bytes that it takes, and all bytes that are in it.
        self.longest = len(unix) + unix.count(b"\n")
        self._bytes = unix + b"\r" * (b"\n" in unix)
        self._last = unix[-1:]

    def split(self, content: bytes) -> list[bytes]:
        """The documents of ``content``; after a separator at its end there is none."""
        found: list[bytes] = self._pattern.split(content)
        return found if found[-1] else found[:-1]

    def first_end(self, content: bytes | bytearray, start: int) -> int:
        """Where the first separator in ``content`` from ``start`` on ends; -1 without one."""
        if content.find(self._last, start) < 0:  # faster by far where nothing is found
            return -1
        found = self._pattern.search(content, start)
        return found.end() if found else -1

    def apart(self, content: bytes) -> int:
        """The last place in ``content`` that no separator reaches over, since the byte before is in none; 0 without."""
        return len(content.rstrip(self._bytes))

    def last_end(self, content: bytes | bytearray, start: int) -> int:
        """Where the last separator in ``content`` from ``start`` on ends; -1 without one."""
        return max((found.end() for found in self._pattern.finditer(content, start)), default=-1)


def separator_of(source: Input, separator: bytes | None) -> Separator | None:
    """The end of a record of ``source``: a line's end, or what ends a text's documents, None for one in each file."""
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
            cuts = _grouped(source, size)
        else:
            cut = _unpacked if source.compression else _ranges
            cuts = cut(source, separator_of(source, separator), size)
        for each in cuts:
            yield replace(each, number=number)
            number += 1


def _grouped(source: Input, size: int) -> Iterator[Block]:
    """The row groups of a Parquet file, whose bytes are shared among them evenly."""
    parts = row_groups(source.path, size)
    of = max((part.stop for part in parts), default=1)
    for part in parts:
        yield Block(0, source, source.size * part.start // of, source.size * part.stop // of, groups=part)


def _ranges(source: Input, separator: Separator | None, size: int) -> Iterator[Block]:
    """The byte ranges of a plain file, each but the last ending with a ``separator``."""
    if separator is None:
        _check_record(source, source.size)
        yield Block(0, source, 0, source.size)
        return
    start = 0
    with open_file(source.path) as file:
        while start < source.size:
            stop = source.size if start + size >= source.size else _after(file, source, separator, start, start + size)
            yield Block(0, source, start, stop)
            start = stop


def _after(file: BinaryIO, source: Input, separator: Separator, begun: int, place: int) -> int:
    """The offset after the first ``separator`` that ends at ``place`` or later; the end of ``source`` if there is none.

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
        _check_record(source, start - place)
    return source.size


def _unpacked(source: Input, separator: Separator | None, size: int) -> Iterator[Block]:
    """The contents of a compressed file in pieces that end with a ``separator``, and the bytes that each came from."""
    waiting, start = bytearray(), 0
    looked, searched = 0, 0  # how much was there, and from where a separator may begin
    for chunk, read in unpacked(source.path, source.compression):
        waiting += chunk
        _check_record(source, len(waiting))
        if separator is None or len(waiting) < max(size, looked + _CHUNK // 2):
            continue
        cut = separator.last_end(waiting, searched)
        looked, searched = len(waiting), max(0, len(waiting) - separator.longest + 1)
        if cut >= 0:
            place = min(read, source.size)
            yield Block(0, source, start, place, bytes(waiting[:cut]))
            start, looked, searched = place, 0, 0
            del waiting[:cut]
    if waiting:
        yield Block(0, source, start, source.size, bytes(waiting))


def _check_record(source: Input, size: int) -> None:
    """Raise :class:`DataError` where a record of ``source`` has ``size`` bytes, more than any document."""
    if size > LARGEST_RECORD[source.format]:
        how = "unpacks to" if source.compression else "has"
        raise DataError(
            f"{source.path} {how} more than {LARGEST_RECORD[source.format] >> 20} MiB without an end of a document",
            fix=f"{'unpack it' if source.compression else 'look'} to see what it is; --separator says what ends a "
            "document of a text",
        )
