"""Saving behind the training: a step is copied, and a thread brings the copy onto the disk while the next steps run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from megatron_run.contracts.activity import Activity, BackgroundActivity
from megatron_run.errors import RunError

if TYPE_CHECKING:
    from megatron_run.contracts.state import StatePiece
    from megatron_run_engine.checkpoint.manifest import About
    from megatron_run_engine.checkpoint.saving import Saver, Shapes
    from megatron_run_engine.checkpoint.staging import Staging


#: Seconds between two looks at what the thread does that is waited for.
_LOOK = 0.05


class Committed(NamedTuple):
    """A step that is on the disk: its size in bytes, and the seconds from the begin of its saving to its end."""

    step: int
    size: int
    seconds: float


class AsyncSaver:
    """Saves one step at a time with ``saver``, whose ranks nobody else may talk over, out of a copy in ``staging``.

    Every rank has one. Each step ends for all of them alike, committed or failed; only when they notice differs.
    ``phases`` are those of the thread, and ``training`` those of the one that uses this object.
    """

    def __init__(
        self,
        saver: Saver,
        staging: Staging,
        activity: BackgroundActivity | None = None,
        training: Activity | None = None,
    ) -> None:
        self._saver, self._staging = saver, staging
        self._training = Activity() if training is None else training
        self._activity = self._training.beside() if activity is None else activity
        self._thread: threading.Thread | None = None
        self._result: Committed | BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a step was given that has not been taken back with :meth:`wait`."""
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Whether that step is committed, or has failed: :meth:`wait` then returns or raises at once."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, about: About, pieces: Iterable[StatePiece], shapes: Shapes) -> None:
        """Copy ``pieces`` and return; the step of ``about`` is then saved as :meth:`Saver.save` does.

        The one before must have been waited for. A copy that fails on one rank fails the step on all of them.
        """
        assert not self.busy, "one step at a time"
        start = time.perf_counter()
        try:
            copied = self._staging.copy(pieces)
        except Exception as error:  # the other ranks wait for a word from this one, whatever happened to it
            copied = _failing(error)
        self._thread = threading.Thread(
            target=self._save, args=(about, copied, dict(shapes), start), name=f"save step {about.step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> Committed:
        """Return when the step is committed. Raises what its saving raised, on every rank the same failure.

        Talks to no other rank by itself: where one has died, the thread finds out. What the thread does meanwhile shows
        as what this rank does.
        """
        assert self._thread is not None, "a step was started"
        shown = None
        while self._thread.is_alive():
            if (doing := self._activity.said) is not shown:
                self._training.heartbeat(doing)
                shown = doing
            self._thread.join(_LOOK)
        self._training.heartbeat()
        self._thread, result, self._result = None, self._result, None
        if isinstance(result, Committed):
            return result
        assert result is not None, "the thread leaves nothing open"
        raise result

    def _save(self, about: About, pieces: Iterator[StatePiece], shapes: Shapes, start: float) -> None:
        self._activity.step(about.step)
        self._activity.enter("save-flush", f"step{about.step}")
        try:
            size = self._saver.save(about, pieces, shapes)
            self._result = Committed(about.step, size, time.perf_counter() - start)
        except BaseException as error:
            if not isinstance(error, RunError):
                error.add_note(f"while step {about.step} was saved behind the training")
            self._result = error


def _failing(error: Exception) -> Iterator[StatePiece]:
    """Boxes that cannot be had."""
    raise error
    yield  # a generator: it fails when it is asked
