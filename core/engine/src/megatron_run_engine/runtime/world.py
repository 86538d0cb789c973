"""One rank's place among the processes of a run, and requests to stop it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from socket import gethostname
from time import monotonic

from megatron_run.errors import ExitCode


@dataclass(frozen=True)
class World:
    """The place of one process among ``size``.

    ``local_rank`` of ``local_size`` counts within the host. ``init_method`` is the address of the rendezvous,
    ``file:///path`` or ``tcp://host:port``, empty for a world of one. ``serves_store`` is true on the rank that serves
    a tcp address. ``restart`` counts how often the launcher has restarted the world after a failure. ``launcher`` names
    what started the processes: ``local`` is our own, ``python`` means that none was started. ``device`` is a torch
    device, ``cpu`` or ``cuda:0``.
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
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.size}")
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(f"local rank {self.local_rank} is outside a host of {self.local_size}")


class StopRequest:
    """A request to stop, made once by a signal handler or when ``seconds`` are over. The trainer reads it every step.

    Signals reach ranks at different moments, so the ranks agree before they stop.
    """

    def __init__(self, seconds: float = inf) -> None:
        self._code: ExitCode | None = None
        self._deadline = monotonic() + seconds

    @property
    def requested(self) -> ExitCode | None:
        """The exit code with which to stop after this step, or None."""
        return self._code or (ExitCode.TIME_LIMIT if monotonic() >= self._deadline else None)

    def stop(self, code: ExitCode) -> bool:
        """Request to stop with ``code``. The first request decides the code. Return whether this was the first."""
        first = self._code is None
        self._code = self._code or code
        return first
