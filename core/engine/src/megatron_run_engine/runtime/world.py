"""One rank's place among the processes of a run, and the wish to stop that may reach it. Pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from socket import gethostname
from time import monotonic

from megatron_run.errors import ExitCode


@dataclass(frozen=True)
class World:
    """Where one process stands among ``size``.

    ``local_rank`` of ``local_size`` counts within the host. ``init_method`` is where the ranks meet, ``file:///path``
    or ``tcp://host:port``, empty for a world of one; ``serves_store`` is true on the rank that listens at a tcp
    address; ``restart`` counts how often the launcher has started the world again after a failure. ``launcher`` started
    the processes: ``local`` is us, ``python`` means no process was started. ``device`` is a torch device, ``cpu`` or
    ``cuda:0``.
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
    """Set at most once, by a signal handler, or by the end of ``seconds``; read by the trainer after each step.

    Signals reach ranks at different moments, so the trainer agrees over the ranks before it stops.
    """

    def __init__(self, seconds: float = inf) -> None:
        self._code: ExitCode | None = None
        self._deadline = monotonic() + seconds

    @property
    def requested(self) -> ExitCode | None:
        """The exit code with which to end after this step, or None to go on."""
        return self._code or (ExitCode.TIME_LIMIT if monotonic() >= self._deadline else None)

    def stop(self, code: ExitCode) -> bool:
        """Ask for the end; the first one to ask decides the code. Whether this was the first."""
        first = self._code is None
        self._code = self._code or code
        return first
