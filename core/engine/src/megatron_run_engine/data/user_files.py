"""Files that people bring: the one reader of their text, of its lines and of JSON lines, and the one that packs.

What such a file means is decided here, so that every command reads it alike:

- A byte order mark of UTF-8 at the start, as programs of Windows write it, is no text.
- A line ends at a line feed, a carriage return before which belongs to the end. No other character ends a line: JSON
  and prose hold U+2028, U+0085, form feeds and lone carriage returns.
- The name says how a file is compressed. A file that breaks off is refused, whichever library unpacks it.
- A pointer that git-lfs keeps instead of a file is refused, wherever a file is opened.
- Nothing is read whole without a limit, since a hole is a file of any length, and nothing but regular files is opened.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from megatron_run.errors import DataError
from megatron_run.errors.wording import near_path
from megatron_run.files.foreign_file import open_file, read_file
from megatron_run.files.safe_folder import parse_json

Compression = Literal["", "gz", "zst"]


class Foreign(NamedTuple):
    """The kind of a file that is no text, and what makes it one."""

    why: str
    fix: str


#: What programs of Windows write before UTF-8.
MARK = codecs.BOM_UTF8
#: How compressed files' names end, and how the files begin.
_COMPRESSED: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
MAGIC: dict[str, bytes] = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd"}
#: How files begin that hold no text, and what they are.
_FOREIGN = {
    MAGIC["gz"]: Foreign("it is compressed by gzip", "name it .gz"),
    MAGIC["zst"]: Foreign("it is compressed by zstd", "name it .zst"),
    b"PK\x03\x04": Foreign("it is a zip archive", "unpack it"),
    b"PAR1": Foreign("it is a Parquet file", "name it .parquet"),
    b"Salted__": Foreign("it is encrypted", "decrypt it"),
    b"-----BEGIN PGP": Foreign("it is encrypted", "decrypt it"),
    b"age-encryption.org": Foreign("it is encrypted", "decrypt it"),
    codecs.BOM_UTF16_LE: Foreign("it is UTF-16", "save it as UTF-8"),
    codecs.BOM_UTF16_BE: Foreign("it is UTF-16", "save it as UTF-8"),
}
#: How a pointer of git-lfs begins (its specification, version 1).
_POINTER = b"version https://git-lfs.github.com/spec/"
#: Bytes of a file that are searched for NUL. A NUL marks a binary file, as it does for grep and git.
PROBE = 8192
#: Bytes that are unpacked at once: one of .gz comes to a thousand at most, 4 of .zst to 128 KiB.
_GZIP_PIECE, _ZSTD_PIECE = 2**14, 2**12
#: The most zeros between and behind what is packed, as tapes have them.
_PADDING = 2**20
#: The most bytes of a file that is read at once, unpacked: a thousand times its length may be packed zeros, or a hole.
LARGEST = 2**30
#: The most bytes of a line: no record of JSON has as many.
LARGEST_LINE = 2**27


def compression_of(path: Path) -> Compression:
    """How the file ``path`` is compressed, by its name; an empty text where it is not."""
    return _COMPRESSED.get(path.suffix.lower(), "")


def start_of(path: Path) -> bytes:
    """Return the first ``PROBE`` bytes as they lie on disk. Raises :class:`DataError` as :func:`read_bytes`."""
    try:
        with open_file(path) as file:
            start = file.read(PROBE)
    except OSError as cause:
        raise unreadable(path, cause) from cause
    refuse_pointer(path, start)
    return start


def pointer_fault(start: bytes) -> str:
    """Why a file that begins with ``start`` is not the one that is meant: git-lfs has not fetched it; else nothing."""
    return "it is a pointer of git-lfs, which has not fetched the file" if start.startswith(_POINTER) else ""


#: What to type where a file is a pointer.
FETCH = "run git lfs pull in its folder"


def refuse_pointer(path: Path, start: bytes | None = None) -> None:
    """Raise :class:`DataError` where the file ``path``, which begins with ``start``, is a pointer of git-lfs.

    Without ``start`` the file is opened; one that cannot be is left to its reader.
    """
    if start is None:
        try:
            with open_file(path) as file:
                start = file.read(len(_POINTER))
        except OSError:
            return
    if why := pointer_fault(start):
        raise DataError(f"{path} is not the file itself", why=why, fix=FETCH)


def foreign(start: bytes) -> Foreign | None:
    """The kind of a file that begins with ``start`` and holds no text; None where it may be text."""
    found = next((what for magic, what in _FOREIGN.items() if start.startswith(magic)), None)
    if found or b"\0" not in start:
        return found
    why = f"a NUL is among its first {PROBE} bytes"
    return Foreign(f"{why}: it is binary, compressed, encrypted or UTF-16", "name files of text in UTF-8")


def unpacked(path: Path, compression: Compression) -> Iterator[tuple[bytes, int]]:
    """Yield the contents of a compressed file without its mark, piece by piece, with the bytes read of it so far.

    Raises :class:`DataError` for a file that cannot be read or unpacked, that breaks off, and without the library.
    """
    begun, first = b"", True
    try:
        opened = open_file(path)
    except OSError as cause:
        raise unreadable(path, cause) from cause
    with opened as packed:
        refuse_pointer(path, packed.read(len(_POINTER)))
        packed.seek(0)
        for piece in _pieces(path, packed, compression):
            begun += piece
            if first and len(begun) < len(MARK):
                continue
            if found := begun.removeprefix(MARK) if first else begun:
                yield found, packed.tell()
            begun, first = b"", False
    if begun:
        yield begun, path.stat().st_size


def _pieces(path: Path, packed: BinaryIO, compression: Compression) -> Iterator[bytes]:
    try:
        if compression == "gz":
            yield from _gzip_pieces(packed)
        else:
            yield from _zstd_pieces(path, packed)
    except (EOFError, OSError) as cause:
        raise DataError(f"{path} cannot be unpacked", why=" ".join(str(cause).split())) from cause
    except (DataError, GeneratorExit):
        raise
    except Exception as cause:  # zlib's and zstd's own errors
        raise DataError(f"{path} is damaged", why=" ".join(str(cause).split())) from cause


def _gzip_pieces(packed: BinaryIO) -> Iterator[bytes]:
    """The contents of a file of members. Raises EOFError where it ends within one, or goes on with zeros."""
    member, waiting, zeros = None, b"", 0
    while waiting := waiting or packed.read(_GZIP_PIECE):
        if member is None:
            begun = waiting.lstrip(b"\0")
            zeros += len(waiting) - len(begun)
            if zeros > _PADDING:
                raise EOFError("zeros follow what is packed")
            waiting = begun
            member = zlib.decompressobj(zlib.MAX_WBITS | 16) if begun else None  # 16: with gzip's header and checksum
            continue
        yield member.decompress(waiting)
        waiting = member.unused_data
        member = None if member.eof else member
    if member is not None:
        raise EOFError("it breaks off before its end")


def _zstd_pieces(path: Path, packed: BinaryIO) -> Iterator[bytes]:
    """The contents of a file of frames. Raises EOFError where it ends within one; the library's readers do not tell."""
    zstandard = _zstandard(path)
    frame = None
    waiting = b""
    while waiting := waiting or packed.read(_ZSTD_PIECE):
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        yield frame.decompress(waiting)
        waiting = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it breaks off before the end of its last frame")


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as cause:
        raise DataError(f"{path} needs the library zstandard", fix="pip install zstandard") from cause
    return zstandard


def packing(path: Path, file: BinaryIO) -> AbstractContextManager[BinaryIO]:
    """The compressor into the open ``file``, as the name of ``path`` says; equal contents make equal files.

    Raises :class:`DataError` without the library.
    """
    compression = compression_of(path)
    if not compression:
        return nullcontext(file)
    if compression == "gz":
        return gzip.GzipFile("", "wb", fileobj=file, mtime=0)  # type: ignore[return-value]  # it writes: enough here
    writer: AbstractContextManager[BinaryIO] = _zstandard(path).ZstdCompressor().stream_writer(file, closefd=False)
    return writer


def read_bytes(path: Path, origin: str = "") -> bytes:
    """Return the contents of a user's file, unpacked as its name says, without its mark.

    Raises :class:`DataError` with ``origin`` for a file that is missing, unreadable, damaged or a pointer of git-lfs.
    """
    compression = compression_of(path)
    try:
        if compression:
            return _joined(path, compression)
        content = read_file(path, LARGEST)
        refuse_pointer(path, content[:PROBE])
    except OSError as cause:
        raise unreadable(path, cause, origin) from cause
    except DataError as error:
        error.origin = error.origin or origin
        raise
    return content.removeprefix(MARK)


def _joined(path: Path, compression: Compression) -> bytes:
    content = bytearray()
    for piece, _ in unpacked(path, compression):
        content += piece
        if len(content) > LARGEST:
            raise DataError(f"{path} unpacks to more than {LARGEST >> 20} MiB", fix="unpack it to see why")
    return bytes(content)


def read_range(path: Path, start: int, stop: int) -> bytes:
    """Return the bytes from ``start`` to ``stop`` of a plain file, without its mark.

    Raises :class:`DataError` for a file that cannot be read or has become shorter.
    """
    try:
        with open_file(path) as file:
            file.seek(start)
            content = file.read(stop - start)
    except OSError as cause:
        raise unreadable(path, cause) from cause
    if len(content) != stop - start:
        raise DataError(f"{path} has become shorter", fix="begin anew with --overwrite")
    return content if start else content.removeprefix(MARK)


def read_text(path: Path, origin: str = "") -> str:
    """Return the text of a user's file with the ends of lines as they stand there.

    Raises :class:`DataError` as :func:`read_bytes`, and for what is not UTF-8.
    """
    content = read_bytes(path, origin)
    try:
        return content.decode()
    except UnicodeDecodeError as cause:
        what = foreign(content[:PROBE]) or Foreign(f"byte {cause.start} is not UTF-8", "")
        raise DataError(f"{path} is no text", why=what.why, origin=origin, fix=what.fix) from cause


def byte_lines(content: bytes) -> list[bytes]:
    """Return the lines of ``content``, empty ones among them, without their ends."""
    lines = content.split(b"\n")
    return [line.removesuffix(b"\r") for line in (lines if lines[-1] else lines[:-1])]


def file_lines(path: Path, origin: str = "") -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a plain file, as :func:`byte_lines` cuts them, with their numbers from 1 on, one in memory.

    Raises :class:`DataError` as :func:`read_bytes`, before the first.
    """
    try:
        refuse_pointer(path, start_of(path)[: len(_POINTER)])
        with open_file(path) as file:
            for number, line in enumerate(iter(partial(file.readline, LARGEST_LINE + 1), b""), 1):
                _check_line(line, path, number)
                yield number, (line.removeprefix(MARK) if number == 1 else line).removesuffix(b"\n").removesuffix(b"\r")
    except OSError as cause:
        raise unreadable(path, cause, origin) from cause
    except DataError as error:
        error.origin = error.origin or origin
        raise


def _check_line(line: bytes, path: Path, number: int) -> None:
    if len(line) > LARGEST_LINE:
        raise DataError(f"{path}:{number} is no line", why=f"it has more than {LARGEST_LINE >> 20} MiB")


def text_lines(path: Path, origin: str = "") -> Iterator[tuple[int, str]]:
    """Yield the lines of a user's text with their numbers from 1 on. Raises as :func:`read_text`, before the first."""
    content = read_text(path, origin).encode()
    return ((number, line.decode()) for number, line in enumerate(byte_lines(content), 1))


def json_line(line: bytes | str) -> Any:
    """The value of a line of JSON lines. Raises ValueError, whose text says what stands there instead."""
    try:
        text = line if isinstance(line, str) else line.removeprefix(MARK).decode()
    except UnicodeDecodeError as cause:
        raise ValueError(f"not UTF-8 at its byte {cause.start}") from cause
    try:
        return parse_json(text)
    except json.JSONDecodeError as cause:
        raise ValueError(f"no JSON: {cause}") from cause


def unreadable(path: Path, cause: OSError, origin: str = "") -> DataError:
    """The error of a user's file that the operating system does not give out."""
    fix = near_path(path) if isinstance(cause, FileNotFoundError) else ""
    if cause.errno == errno.EFBIG:
        fix = "cut it into smaller files"
    return DataError(f"{path} cannot be read", why=cause.strerror or str(cause), origin=origin, fix=fix)
