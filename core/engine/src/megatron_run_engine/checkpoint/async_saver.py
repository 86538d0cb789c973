"""Asynchronous saving: the state is copied, and a thread writes the copy to disk while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from megatron_run.contracts.activity import Activity, BackgroundActivity
from megatron_run.errors import RunError
from megatron_run_engine.checkpoint.shard_file import by_name, place

if TYPE_CHECKING:
    from megatron_run.contracts.optimizer import StatePiece
    from megatron_run_engine.checkpoint.manifest import About
    from megatron_run_engine.checkpoint.saving import Shapes


class Staging:
    """Host memory for one copy of the state on ``device``. It grows as needed and is then kept.

    The boxes lie in it one after the other, in the order of their file. State on a CUDA device is copied into pinned
    memory without blocking the host. The copies are issued on the current stream, so no update that is launched later
    can change what they read.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """Size of the memory."""
        return self._memory.nbytes

    @torch.no_grad()
    def copy(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """Copy ``pieces`` and return the same boxes with their values of now.

        The returned iterator waits for the device before its first box, in whatever thread it is consumed. Its boxes
        are valid until the next call of this method.
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
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory first
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)

    @staticmethod
    def _arriving(copies: list[StatePiece], arrived: torch.cuda.Event | None) -> Iterator[StatePiece]:
        if arrived is not None:
            arrived.synchronize()
        yield from copies


#: Seconds between two polls of a saving thread by :meth:`AsyncSaver.wait`.
_POLL = 0.05


class Committed(NamedTuple):
    """A committed step: its size in bytes, and the seconds from :meth:`AsyncSaver.start` to the commit."""

    step: int
    size: int
    seconds: float


class SavesSteps(Protocol):
    """A :class:`~megatron_run_engine.checkpoint.saving.Saver`, of disks or of memory."""

    def save(self, about: About, pieces: Iterable[StatePiece], shapes: Shapes) -> int:
        """Save the step of ``about``, and return its size in bytes. Collective."""


class AsyncSaver:
    """Saves one step at a time with ``saver`` from a copy in ``staging``. Every rank has one.

    The process group of ``saver`` must not be used by any other thread. Each save ends alike on all ranks, committed or
    failed, but not at the same time. ``activity`` records what the saving thread does, ``training`` what the calling
    thread does.
    """

    def __init__(
        self,
        saver: SavesSteps,
        staging: Staging,
        activity: BackgroundActivity | None = None,
        training: Activity | None = None,
    ) -> None:
        self._saver, self._staging = saver, staging
        self._training = training or Activity()
        self._activity = activity or self._training.in_background()
        self._thread: threading.Thread | None = None
        self._result: Committed | BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a step was started and :meth:`wait` has not been called for it."""
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Whether that step is committed or has failed, so that :meth:`wait` will not block."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, about: About, pieces: Iterable[StatePiece], shapes: Shapes) -> None:
        """Copy ``pieces``, start to save the step of ``about`` as :meth:`Saver.save` does, and return.

        :meth:`wait` must have been called for the step before. If the copy fails on one rank, the step fails on all.
        """
        assert not self.busy, "one step at a time"
        start = time.perf_counter()
        try:
            copied = self._staging.copy(pieces)
        except Exception as error:
            copied = _failing(error)  # raised in the thread, whose collectives tell the other ranks
        self._thread = threading.Thread(
            target=self._save, args=(about, copied, dict(shapes), start), name=f"save step {about.step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> Committed:
        """Wait until the step is committed. Raises the error of its save, the same on every rank.

        This method issues no collective: if a rank has died, the thread's collective fails. Meanwhile the thread's
        activity is reported as this rank's, so that a hang of the save is named.
        """
        assert self._thread is not None, "a step was started"
        shown = None
        while self._thread.is_alive():
            if (doing := self._activity.said) is not shown:
                self._training.heartbeat(doing)
                shown = doing
            self._thread.join(_POLL)
        self._training.heartbeat()
        self._thread, result, self._result = None, self._result, None
        if isinstance(result, Committed):
            return result
        assert result is not None, "the thread always sets a result"
        raise result

    def _save(self, about: About, pieces: Iterator[StatePiece], shapes: Shapes, start: float) -> None:
        self._activity.step(about.step)
        self._activity.enter("save-flush", f"step{about.step}")
        try:
            size = self._saver.save(about, pieces, shapes)
            self._result = Committed(about.step, size, time.perf_counter() - start)
        except BaseException as error:
            if not isinstance(error, RunError):
                error.add_note(f"while step {about.step} was saved asynchronously")
            self._result = error


def _failing(error: Exception) -> Iterator[StatePiece]:
    """Return an iterator that raises ``error`` when it is consumed."""
    raise error
    yield  # makes this a generator, so that calling it does not raise yet
