"""Reads status pages again and again, and counts for how long each has not changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from math import inf
from pathlib import Path

from megatron_run.errors import RankLostError
from megatron_run_engine.launch.watchdog.page import Page
from megatron_run_engine.launch.watchdog.verdict import RankState, UnblockedTimer, judge

#: Seconds between two looks.
INTERVAL = 0.1
#: Seconds that one look counts at most: a longer gap means that the watchdog itself, or the machine, was asleep.
LONGEST = 1.0


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped ``process`` (state T); False where there is no /proc to tell."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


class RankMonitor:
    """Watches one rank by its page. Time is counted by its own looks: while it is stopped itself, no rank ages."""

    def __init__(self, path: Path, stopped: Callable[[int], bool] = is_stopped) -> None:
        self._path, self._is_stopped = path, stopped
        self._changes = 0
        self._quiet = self._stopped = 0.0

    def look(self, passed: float) -> None:
        """Look again after ``passed`` seconds."""
        changes = Page.changes_at(self._path)
        self._quiet = self._quiet + passed if changes == self._changes else 0.0
        self._changes = changes
        page = self.page() if self._quiet and changes else None
        self._stopped = self._stopped + passed if page is not None and self._is_stopped(page.process) else 0.0

    def page(self) -> Page | None:
        """The page as it is now."""
        return Page.read(self._path)

    def state(self, *, ended: bool = False) -> RankState:
        """The rank as it is judged."""
        return RankState(self.page(), self._quiet, self._stopped, ended)

    @property
    def age(self) -> float:
        """Seconds for which its page has not changed, or it was stopped."""
        return max(self._quiet, self._stopped)


class Watchdog:
    """Watches the ranks whose pages are at ``paths``, by rank, as often as :meth:`look` is called."""

    def __init__(
        self,
        paths: Sequence[Path],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        stopped: Callable[[int], bool] = is_stopped,
    ) -> None:
        self._ranks = [RankMonitor(path, stopped) for path in paths]
        self._unblocked = UnblockedTimer(timeout, len(paths))
        self._timeout, self._clock = timeout, clock
        self._last = clock()

    def look(self, ended: Collection[int] = ()) -> RankLostError | None:
        """The error that names a rank; None if all is well, or it is too early to look. ``ended`` ranks have ended."""
        passed = self._clock() - self._last
        if passed < INTERVAL or self._timeout == inf:
            return None
        self._last += passed
        for rank in self._ranks:
            rank.look(min(passed, LONGEST))
        # Reading whole pages at every look would be dear; half the limit is early enough to time who is unblocked.
        if all(rank.age < self._timeout / 2 for rank in self._ranks):
            return None
        states = [rank.state(ended=number in ended) for number, rank in enumerate(self._ranks)]
        states = self._unblocked.update(min(passed, LONGEST), states)
        return judge(states, self._timeout) if any(rank.age >= self._timeout for rank in self._ranks) else None

    @property
    def age(self) -> float:
        """Seconds for which the page of the rank that is longest without a change has not changed."""
        return max(rank.age for rank in self._ranks)

    def page(self, rank: int) -> Page | None:
        """The page of ``rank`` as it is now."""
        return self._ranks[rank].page()
