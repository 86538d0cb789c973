"""The output of a rank: its way to the log, from that of rank 0 to the terminal, and what the launcher reads of it."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any, TextIO, cast

from megatron_run_engine.run_folder.folder import open_log

#: Seconds between two looks at rank 0's log: a progress bar moves ten times a second at most.
_RELAY = 0.05
#: Bytes that a reader is given at once: what a slow one takes shows by these.
_PIECE = 4096


def redirect_output(log: Path) -> None:
    """Make ``log`` this process's descriptors 1 and 2."""
    flush_output()
    descriptor = open_log(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


@contextmanager
def shown_log(log: Path, shown_before: Sequence[str] = ()) -> Iterator[None]:
    """Within: what Python prints is in ``log`` too. It begins with the lines that were ``shown_before``.

    Descriptors 1 and 2 stay as they are, since whoever started this process collects them, each by itself, and nothing
    of ours stands between them and a library that ends the process. So what C prints is there alone.
    """
    with os.fdopen(open_log(log), "wb", buffering=0) as file:
        for line in shown_before:
            _log(file, f"{line}\n")
        out, err = (cast("TextIO", _Both(stream, file)) for stream in (sys.stdout, sys.stderr))
        with redirect_stdout(out), redirect_stderr(err):
            yield


def append_line(log: Path, line: str) -> None:
    """Write ``line`` to ``log`` alone; a disk that is full is none of the reader's troubles."""
    with suppress(OSError), os.fdopen(open_log(log), "wb", buffering=0) as file:
        _log(file, f"{line}\n")


class _Both:
    """The stream ``shown``, whose text a log gets too. Without a reader, or closed, it takes nothing: the log does.

    A line is flushed, so that it is seen though the process aborts.
    """

    def __init__(self, shown: TextIO, log: RawIOBase) -> None:
        self._shown, self._log = shown, log

    def write(self, text: str) -> int:
        """Write ``text`` to both; its length."""
        _log(self._log, text)
        with suppress(OSError, ValueError, AttributeError):
            self._shown.write(text)
            if "\n" in text:
                self._shown.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines`` to both."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Write what is left to the stream; the log has it."""
        with suppress(OSError, ValueError, AttributeError):
            self._shown.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


def _log(log: RawIOBase, text: str) -> None:
    with suppress(OSError, ValueError):  # a full disk ends no training; what a library has kept of a stream outlives it
        _write(log.write, text.encode(errors="backslashreplace"))


def terminal_environment() -> dict[str, str]:
    """The variables by which a rank draws for our terminal, though it writes to a file."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    return {"FORCE_COLOR": "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}


def flush_output() -> None:
    """Write what is printed and not yet written, if anybody still takes it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


class Relay:
    """Copies ``log`` to ``write``, in a thread.

    When the reader is gone (EPIPE), training continues unseen; when there is no room, or the log cannot be read,
    ``tell`` says so. ``bars``: the last line may be a bar that is drawn again and again, which is ended before a line;
    else all that is copied is what somebody asked for, and nothing is added.
    """

    def __init__(
        self, log: Path, write: Callable[[bytes], None], tell: Callable[[str], None], *, bars: bool = False
    ) -> None:
        self._log, self._write, self._tell, self._bars = log, write, tell, bars
        self._ended = threading.Event()
        self._taken = 0  # pieces
        self._within_line = False  # where a bar leaves the cursor
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def tell(self, line: str) -> None:
        """Tell ``line`` between what is copied, from the beginning of a line."""
        self._end_line()
        self._tell(line)

    def _end_line(self) -> None:
        if self._within_line:
            self._within_line = False
            with suppress(OSError, ValueError):  # nobody reads
                self._write(b"\n")

    def finish(self, within: float = 2.0) -> None:
        """Copy what is left and end; a reader that takes nothing for ``within`` seconds is left alone."""
        self._ended.set()
        taken = -1
        while self._thread.is_alive() and taken != self._taken:
            taken = self._taken
            self._thread.join(within)
        if not self._thread.is_alive():
            self._end_line()

    def _run(self) -> None:
        try:
            with os.fdopen(open_log(self._log, os.O_RDONLY), "rb") as log:
                while self._copied(log.read()):
                    if self._ended.wait(_RELAY):
                        self._copied(log.read())
                        return
        except OSError as error:
            self.tell(f"{self._log} cannot be read, and is shown no more: {error.strerror}; the run goes on")

    def _copied(self, data: bytes) -> bool:
        """Copy ``data``; whether anybody takes more of it."""
        self._within_line = self._bars and (not data.endswith(b"\n") if data else self._within_line)
        try:
            for start in range(0, len(data), _PIECE):
                self._write(data[start : start + _PIECE])
                self._taken += 1
        except (BrokenPipeError, ValueError):  # the reader is gone, or the stream was closed
            return False
        except OSError as error:
            why = f"standard output cannot be written: {error.strerror}"
            self.tell(f"{why}; the run goes on, and prints into {self._log}")
            return False
        return True


def terminal_writer() -> Callable[[bytes], None]:
    """Write bytes to standard output: unbuffered, else as text (a notebook has no descriptor)."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        text = getincrementaldecoder("utf-8")(errors="replace")  # a piece may end within a character
        return lambda data: print(text.decode(data), end="", flush=True)  # noqa: T201  # the only way there

    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)  # which may do more than its descriptor does
    return partial(_write, raw.write if raw else partial(os.write, descriptor))


def _write(write: Callable[[bytes], int | None], data: bytes) -> None:
    while data:
        done = write(data)
        if done is None:  # as a raw stream says it
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        data = data[done:]


def last_log_line(log: Path, window: int = 8192) -> str:
    """The last line of ``log`` that is not empty, as far as its last ``window`` bytes tell."""
    try:
        with os.fdopen(open_log(log, os.O_RDONLY), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - window))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def count_warnings(log: Path) -> tuple[int, str]:
    """How many lines of ``log`` are warnings, and the first of them."""
    try:
        with os.fdopen(open_log(log, os.O_RDONLY), encoding="utf-8", errors="replace") as lines:
            found = [line.strip() for line in lines if "Warning:" in line or line.startswith(("WARNING", "warning:"))]
    except OSError:
        return 0, ""
    return len(found), found[0] if found else ""
