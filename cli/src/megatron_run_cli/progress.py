"""How far a command is that reads much: a bar for who watches, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_run_cli.output import tell

#: Seconds between two lines about what was done, where they go into a file.
LINE_EVERY = 30.0


def _lines(size: int) -> Callable[[int, int], None]:
    """Tells now and then how many of ``size`` bytes are read: called with these bytes, and tokens."""
    begun = last = time.monotonic()

    def progress(done: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_EVERY:
            last = now
            left = (size - done) * (now - begun) / max(done, 1)
            tell(f"{done / 1e6:,.1f} of {size / 1e6:,.1f} MB, {tokens:,} tokens; about {left:,.0f} s left")

    return progress


@contextmanager
def progress_bar(size: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error with rate and time left, or lines where nobody watches. It is told bytes and tokens."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(size)
        return
    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=size, tokens=0)
        yield lambda done, tokens: bar.update(task, completed=done, tokens=tokens)
