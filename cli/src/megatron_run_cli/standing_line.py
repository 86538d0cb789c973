"""A line on the terminal that says what is done, and is gone before this process prints anything else there.

Logs, pipes and whoever reads them get none.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any

#: To the beginning of the line, and erase it: https://en.wikipedia.org/wiki/ANSI_escape_code.
_ERASE = b"\r\x1b[K"
#: Columns of a terminal that does not say how many it has.
_COLUMNS = 80
#: The process that shows a line, which a fork of it does not; taken out by the one that erases it, of several threads.
_shown_by: list[int] = []


class Erasing(io.FileIO):
    """A stream before whose next bytes the standing line goes."""

    def write(self, data: Any, /) -> int:
        """Write ``data``; its length in bytes."""
        erase()
        return super().write(data)


def stand(line: str) -> None:
    """Show ``line``, cut to the width, if standard error is a terminal, and all that is printed can erase it."""
    streams = (getattr(getattr(each, "buffer", None), "raw", None) for each in (sys.stdout, sys.stderr))
    if not all(isinstance(each, Erasing) for each in streams) or os.environ.get("TERM", "dumb") == "dumb":
        return
    with suppress(OSError):  # not a terminal
        columns = os.get_terminal_size(2).columns or _COLUMNS
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, line[: columns - 1].encode(errors="replace"))
        _shown_by.append(os.getpid())


def erase() -> None:
    """Take the line away, if one stands."""
    with suppress(IndexError, OSError):
        if _shown_by.pop() == os.getpid():
            os.write(2, _ERASE)
