"""Saving behind the training: a step is copied, and a thread brings the copy onto the disk while the next steps run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run.contracts.activity import Activity, BackgroundActivity
from megatron_run.errors import RunError
from megatron_run_engine.checkpoint.shard_file import by_name, place

if TYPE_CHECKING:
    from megatron_run.contracts.state import StatePiece
    from megatron_run_engine.checkpoint.manifest import About
    from megatron_run_engine.checkpoint.saving import Saver, Shapes


class Staging:
    """Memory for one copy, which grows to what the first copies need and is then kept; ``device`` is where state lives.

    Boxes lie in it in the order of their file, one after the other. State of a CUDA device is copied into pinned memory
    while the host goes on; the copy is made in the order of the device's work, so nothing that is started later can
    change it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """How much memory it holds."""
        return self._memory.nbytes

    @torch.no_grad()
    def copy(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """Copy ``pieces``; the same boxes with the values that they have now.

        What is returned waits for the device when it is first asked for a box, whichever thread asks. It is good until
        the next copy is made.
        """
        named = by_name(pieces)
        entries = place({name: piece.tensor for name, piece in named.items()})
        self._reserve(max((entry.stop for entry in entries.values()), default=0))
        copies = []
        for name, piece in named.items():
            raw = self._memory[entries[name].start : entries[name].stop]
            copy = raw.view(piece.tensor.dtype).view(piece.tensor.shape)
            copy.copy_(piece.tensor, non_blocking=True)
            copies.append(piece._replace(tensor=copy))
        return self._arriving(copies, torch.cuda.current_stream(self._device).record_event() if self._cuda else None)

    def _reserve(self, size: int) -> None:
        if size > self.bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old memory goes before the new one comes
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)

    @staticmethod
    def _arriving(copies: list[StatePiece], arrived: torch.cuda.Event | None) -> Iterator[StatePiece]:
        if arrived is not None:
            arrived.synchronize()
        yield from copies


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
