"""A rank's place among the processes of a run, and the request to stop that may reach it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from socket import gethostname
from time import monotonic
from typing import Literal

from megatron_run.errors import ExitCode


@dataclass(frozen=True)
class World:
    """One process among ``size``.

    ``local_rank`` of ``local_size`` counts within the host. ``init_method`` is the address of the rendezvous,
    ``file:///path`` or ``tcp://host:port``, empty for a world of one. ``serves_store`` is true on the rank that listens
    at a tcp address. ``restart`` counts how often the launcher has restarted the world after a failure. ``launcher``
    names what started the processes: ``local`` is our launcher, ``python`` means that no process was started.
    Of them ``left_out`` ranks have the last numbers, and stand by since the run folder excludes them.
    ``device`` is a torch device, ``cpu`` or ``cuda:0``; ``backend`` carries what ranks say to each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    init_method: str = ""
    serves_store: bool = False
    restart: int = 0
    launcher: str = "python"
    host: str = field(default_factory=gethostname)
    left_out: int = 0
    device: str = "cpu"
    backend: Literal["nccl", "gloo"] = "gloo"

    def first(self, size: int) -> World:
        """The world of its first ``size`` ranks, of which this is one: the others are spares."""
        before = self.rank - self.local_rank  # ranks are numbered host by host
        here = max(self.local_rank + 1, min(self.local_size, size - before))
        return self if size == self.size else replace(self, size=size, local_size=here)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.size}")
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(f"local rank {self.local_rank} is outside a host of {self.local_size}")


#: Seconds before the end of ``run.stop_within`` by which a process leaves: at most this, and this part of it.
LEAVING, _PART = 1.0, 0.25


class StopRequest:
    """A request to stop, set at most once by a signal handler or after ``seconds``; the trainer reads it every step.

    Signals reach ranks at different moments, so the ranks agree through the step's metrics before any of them stops.
    ``begun`` says whether a step has begun, after which the run will stop.

    After a signal the process must have ended ``within`` so many seconds. What still fits is judged by what the last
    step and the last save took, which the trainer notes; nothing is known before the first.
    """

    def __init__(self, seconds: float = inf, within: float = inf) -> None:
        self._code: ExitCode | None = None
        #: What has asked for the end where that was no signal and not the time; else empty.
        self.notice = ""
        self._deadline = monotonic() + seconds
        self.within, self._ends = within, inf
        self.begun = False
        self.step, self.save_seconds = 0, 0.0
        self._step_seconds, self._since = 0.0, inf
        self._read = self._late = self._signalled = False

    @property
    def requested(self) -> ExitCode | None:
        """The exit code with which to end after this step, or None to continue."""
        return self._code or (ExitCode.TIME_LIMIT if monotonic() >= self._deadline else None)

    def stop(self, code: ExitCode, notice: str = "") -> bool:
        """Request the end with ``code``; the first request decides. Returns whether this was the first signal.

        A ``notice`` that is none, as a file, is followed by a signal soon: that asks for nothing more.
        """
        if self._code is None:
            self._ends, self.notice = monotonic() + self.within, notice
            self._late = self._read and self._since != inf
        self._code = self._code or code
        first, self._signalled = not self._signalled, self._signalled or not notice
        return first

    def stopped_by(self, code: ExitCode) -> str:
        """The cause that has stopped the run with ``code``, on which the ranks have agreed."""
        return self.notice or code.stopped_by

    @property
    def left(self) -> float:
        """Seconds until this process leaves; unlimited while nobody has asked, or has set no limit."""
        return self._ends - min(LEAVING, _PART * self.within) - monotonic()

    def begin_step(self, step: int) -> None:
        """Note that ``step`` begins."""
        self.begun, self.step, self._since = True, step, monotonic()
        self._read = self._late = False

    def read(self) -> ExitCode | None:
        """:attr:`requested` as this step answers it: what is requested later waits for the end of the next one."""
        self._read = True
        return self.requested

    def end_step(self) -> None:
        """Note that the step has ended."""
        self._step_seconds, self._since = monotonic() - self._since, inf

    @property
    def save_fits(self) -> bool:
        """Whether a save that takes as long as the last one ends in time."""
        return self.save_seconds <= self.left

    @property
    def step_fits(self) -> bool:
        """Whether the step after which the run will stop ends in time, and with it a save."""
        if self._since == inf:  # what is saved between two steps is not given up for the next one
            return True
        under_way = max(0.0, self._step_seconds - (monotonic() - self._since))
        return under_way + self.save_seconds + (self._step_seconds if self._late else 0.0) <= self.left
