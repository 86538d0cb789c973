"""A line about progress that changes in place: a bar on a terminal, an output of its own in a notebook, else nothing.

A notebook is no terminal: it would show each redrawing of a bar of rich as a new output, and its codes as text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

#: Seconds between two redraws.
REDRAW = 0.1


class InPlace(ABC):
    """How much of ``total`` is done, with a note; it appears once ``after`` seconds have passed."""

    def __init__(self, total: int, after: float = 0.0) -> None:
        self.total, self._due = total, monotonic() + after
        self._drawn = False
        self._waiting: tuple[int, str] | None = None

    def show(self, done: int, note: str = "") -> None:
        """Draw it, at most every ``REDRAW`` seconds."""
        self._waiting = done, note
        if monotonic() >= self._due:
            self._draw_waiting()

    def stop(self) -> None:
        """Draw what was shown last, and let other output follow."""
        if self._drawn:
            self._draw_waiting()
            self.close()

    def _draw_waiting(self) -> None:
        if self._waiting is not None:
            self.draw(*self._waiting)
            self._waiting, self._drawn, self._due = None, True, monotonic() + REDRAW

    @abstractmethod
    def draw(self, done: int, note: str) -> None:
        """Draw it now."""

    def close(self) -> None:  # noqa: B027  # an output stays as it is
        """Restore what drawing has changed."""


class Bar(InPlace):
    """On a terminal; a ``passing`` one goes when it stops."""

    def __init__(self, console: Console, what: str, total: int, after: float, *, passing: bool) -> None:
        super().__init__(total, after)
        self._progress = Progress(
            TextColumn(f"{what} {{task.completed:.0f}}/{{task.total:.0f}}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),  # the whole line then fits 80 columns
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True)),
            console=console,
            auto_refresh=False,  # no thread that competes with the training, and no redirected streams
            redirect_stdout=False,
            redirect_stderr=False,
            transient=passing,
        )
        self._task = self._progress.add_task(what, total=total, note="")

    def draw(self, done: int, note: str) -> None:
        """Draw the bar."""
        self._progress.start()
        self._progress.update(self._task, completed=done, note=note)
        self._progress.refresh()

    def close(self) -> None:
        """Restore the cursor."""
        self._progress.stop()


class Output(InPlace):
    """In a notebook: one output of the cell, which is replaced; what it shows last stays in the file."""

    def __init__(self, what: str, total: int, after: float) -> None:
        super().__init__(total, after)
        self._what = what
        self._handle: Any = None

    def draw(self, done: int, note: str) -> None:
        """Replace the output."""
        from IPython.display import display  # a notebook has it

        text = f"{self._what} {done}/{self.total}  {note}".rstrip()
        bar = f'<progress value="{done}" max="{self.total}" style="width: 12em"></progress>'
        shown = {"text/plain": text, "text/html": f"{bar} <code>{escape(text)}</code>"}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def in_place(console: Console, what: str, total: int, *, after: float = 0.0, passing: bool = False) -> InPlace | None:
    """``what 3/20`` where ``console`` writes, once ``after`` seconds have passed; None where nothing can change."""
    if console.is_jupyter:
        return Output(what, total, after)
    return Bar(console, what, total, after, passing=passing) if console.is_interactive else None
