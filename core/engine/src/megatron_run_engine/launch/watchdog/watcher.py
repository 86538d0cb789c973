"""Looks at the pages of ranks again and again, and counts for how long each has said nothing new."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from math import inf
from pathlib import Path

from megatron_run.errors import RankLostError
from megatron_run_engine.launch.watchdog.page import Page
from megatron_run_engine.launch.watchdog.verdict import Seen, Waits, judge

#: Seconds between two looks.
INTERVAL = 0.1
#: A look that comes later than this finds that the watcher itself was held up, and counts no more.
LONGEST = 1.0


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped ``process`` (state T); False where there is no /proc to tell."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


class RankWatch:
    """One rank, by its page. The seconds are the watcher's own: while it is stopped itself, no rank grows older."""

    def __init__(self, path: Path, stopped: Callable[[int], bool] = is_stopped) -> None:
        self._path, self._is_stopped = path, stopped
        self._changes = 0
        self._quiet = self._stopped = 0.0

    def look(self, passed: float) -> None:
        """Look again after ``passed`` seconds."""
        changes = Page.changes_at(self._path)
        if changes == self._changes:
            self._quiet += passed
        else:
            self._quiet = 0.0
        self._changes = changes
        page = self.page() if self._quiet and changes else None
        self._stopped = self._stopped + passed if page is not None and self._is_stopped(page.process) else 0.0

    def page(self) -> Page | None:
        """What the rank has said last."""
        return Page.read(self._path)

    def seen(self, *, ended: bool = False) -> Seen:
        """The rank as it is judged."""
        return Seen(self.page(), self._quiet, self._stopped, ended)

    @property
    def age(self) -> float:
        """Seconds for which it has said nothing new, or was stopped."""
        return max(self._quiet, self._stopped)


class Watcher:
    """Watches the ranks whose pages are at ``paths``, by rank, as often as :meth:`look` is called."""

    def __init__(
        self,
        paths: Sequence[Path],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        stopped: Callable[[int], bool] = is_stopped,
    ) -> None:
        self._ranks = [RankWatch(path, stopped) for path in paths]
        self._waits = Waits(timeout, len(paths))
        self._timeout, self._clock = timeout, clock
        self._last = clock()

    def look(self, ended: Collection[int] = ()) -> RankLostError | None:
        """What is wrong; None if nothing is, or it is too early to look. ``ended`` ranks have come to their end."""
        passed = self._clock() - self._last
        if passed < INTERVAL or self._timeout == inf:
            return None
        self._last += passed
        for rank in self._ranks:
            rank.look(min(passed, LONGEST))
        if all(rank.age < self._timeout / 2 for rank in self._ranks):
            return None  # early enough to learn who waits for nobody, and not at every look
        seen = [rank.seen(ended=number in ended) for number, rank in enumerate(self._ranks)]
        seen = self._waits.after(min(passed, LONGEST), seen)
        return judge(seen, self._timeout) if any(rank.age >= self._timeout for rank in self._ranks) else None

    def page(self, rank: int) -> Page | None:
        """What ``rank`` has said last."""
        return self._ranks[rank].page()
