"""How a run is started, apart from what is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchOptions:
    """How a run is started, apart from what is trained.

    ``arguments`` are remembered in the run folder; ``quiet`` shows nothing of rank 0; ``debug`` keeps tracebacks of
    documented errors too; ``tell`` shows a line of the launcher to the user. Local ranks are started again at most
    ``max_restarts`` times.
    """

    arguments: Sequence[str] = ()
    quiet: bool = False
    debug: bool = False
    max_restarts: int = 0
    tell: Callable[[str], None] = print
