"""The surroundings of a command: streams that may be closed, a disk that may be full, a folder that may be gone.

On a terminal a line may stand that says what is done, and is gone before this process prints anything else there.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_run.errors import DataError, InputError, RunError

#: Errors of disks on which nothing more can be written.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


#: To the beginning of the line, and erase it: https://en.wikipedia.org/wiki/ANSI_escape_code.
_ERASE = b"\r\x1b[K"
#: Columns of a terminal that does not say how many it has.
_COLUMNS = 80
#: The process that shows a line, which a fork of it does not; taken out by the one that erases it, of several threads.
_shown_by: list[int] = []
#: What an error of writing there has as its file.
_OUTPUT = "standard output"


class _Erasing(io.FileIO):
    """A stream before whose next bytes the standing line goes."""

    def write(self, data: Any, /) -> int:
        """Write ``data``; its length in bytes."""
        erase()
        return super().write(data)


class _Output(_Erasing):
    """Standard output, by whose name its errors are told from those of files."""

    def write(self, data: Any, /) -> int:
        """Write ``data``; its length in bytes. Raises OSError with the name."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _OUTPUT
            raise


class _Heedless(_Erasing):
    """A file descriptor to which everything can be written: what it refuses is lost."""

    def write(self, data: Any, /) -> int:
        """Write ``data``, or nothing; its length in bytes."""
        with suppress(OSError):
            return super().write(data)
        return len(data)


def open_streams() -> None:
    """Open nothing in the place of each stream that is closed, and let messages fail without ending the process.

    Otherwise a command's first file would become its standard output.
    """
    for number in range(3):  # in this order: the lowest free number is taken
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # for as long as the process lives
    if isinstance(sys.stdin, io.TextIOWrapper):  # a byte that is no text is told by typed_lines, whatever the locale
        with suppress(io.UnsupportedOperation):  # a program that calls ours has read from it before
            sys.stdin.reconfigure(encoding=None if sys.stdin.isatty() else "utf-8", errors="surrogateescape")
    given = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(1, "w", closefd=False)),
        given.encoding,
        given.errors,
        line_buffering=bool(given.line_buffering),
        write_through=getattr(given, "write_through", False),  # with PYTHONUNBUFFERED
    )
    raw = io.BufferedWriter(_Heedless(2, "w", closefd=False))
    encoding = getattr(sys.stderr, "encoding", "utf-8")
    sys.stderr = io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=True)


def stand(line: str) -> None:
    """Show ``line``, cut to the width, if standard error is a terminal, and all that is printed can erase it."""
    streams = (getattr(getattr(each, "buffer", None), "raw", None) for each in (sys.stdout, sys.stderr))
    if not all(isinstance(each, _Erasing) for each in streams) or os.environ.get("TERM", "dumb") == "dumb":
        return
    with suppress(OSError):  # not a terminal
        columns = os.get_terminal_size(2).columns or _COLUMNS
        sys.stdout.flush()
        sys.stderr.flush()
        _shown_by.append(os.getpid())  # first: a signal may end this between the two
        os.write(2, line[: columns - 1].encode(errors="replace"))


def erase() -> None:
    """Take the line away, if one stands."""
    with suppress(IndexError, OSError):
        if _shown_by.pop() == os.getpid():
            os.write(2, _ERASE)


def typed_text() -> str:
    """All of standard input. Raises :class:`DataError` as :func:`typed_lines`."""
    return "".join(typed_lines())


def typed_lines() -> Iterator[str]:
    """The lines of standard input with their ends. Raises :class:`DataError` for a byte that is not UTF-8, by place."""
    for number, line in enumerate(sys.stdin, 1):
        try:
            line.encode()
        except UnicodeEncodeError as cause:  # each such byte is one surrogate
            place = len(line[: cause.start].encode()) + 1
            what = f"standard input is no text: byte {place} of line {number} is not UTF-8"
            raise DataError(what, fix="convert it, as with iconv -t utf-8") from cause
        yield line


def flush_output() -> OSError | None:
    """Write what is left of standard output: why it cannot be, after which nothing is left that could fail again."""
    try:
        sys.stdout.flush()
    except ValueError:  # a plugin has closed it
        return None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
        return error
    return None


def full_disk(error: BaseException) -> RunError | None:
    """The message where ``error`` is that of a full disk, else None."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return None
    fix = "make room there, and run the same command again"
    if error.filename == _OUTPUT:  # the command is over, or at its end: what it prints is about what it has done
        fix = "files that the command had written are whole; send what it prints elsewhere"
    return DataError(f"{error.filename or 'the output'} cannot be written", why=os.strerror(error.errno), fix=fix)


def check_folder() -> None:
    """Raise :class:`InputError` where the current folder was removed: some library of torch's would end the process."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise InputError("the current folder was removed", fix="cd to one that exists") from error
