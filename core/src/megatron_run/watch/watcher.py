"""Looks at the pages of ranks again and again, and counts for how long each has said nothing new."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from megatron_run.errors import RankLostError
from megatron_run.watch.page import Page
from megatron_run.watch.verdict import Seen, judge, who_waits_for_nobody

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
        self._quiet = self._quiet + passed if changes == self._changes else 0.0
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


class Jury:
    """Judges ``size`` ranks again and again, and remembers for how long each has waited for nobody."""

    def __init__(self, size: int, timeout: float) -> None:
        self._timeout = timeout
        self._alone, self._quiet = [0.0] * size, [0.0] * size

    def is_early(self, ages: Iterable[float]) -> bool:
        """Whether nothing is to be learned yet from ranks that have been silent for so long."""
        return all(age < self._timeout / 2 for age in ages)

    def look(self, ranks: Sequence[Seen], passed: float) -> RankLostError | None:
        """What is wrong with ``ranks``, if anything is, ``passed`` seconds after the look before."""
        for rank, (seen, free) in enumerate(zip(ranks, who_waits_for_nobody(ranks, self._timeout), strict=True)):
            went_on = seen.quiet < self._quiet[rank]
            self._alone[rank] = 0.0 if went_on or not free else self._alone[rank] + passed
            self._quiet[rank] = seen.quiet
        judged = [replace(seen, alone=alone) for seen, alone in zip(ranks, self._alone, strict=True)]
        return judge(judged, self._timeout)


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
        self._timeout, self._clock, self._jury = timeout, clock, Jury(len(paths), timeout)
        self._last = clock()

    def look(self, ended: Collection[int] = ()) -> RankLostError | None:
        """What is wrong; None if nothing is, or it is too early to look. ``ended`` ranks have come to their end."""
        passed = self._clock() - self._last
        if passed < INTERVAL or self._timeout == inf:
            return None
        self._last += passed
        for rank in self._ranks:
            rank.look(min(passed, LONGEST))
        if self._jury.is_early(rank.age for rank in self._ranks):
            return None
        seen = [rank.seen(ended=number in ended) for number, rank in enumerate(self._ranks)]
        return self._jury.look(seen, min(passed, LONGEST))

    def page(self, rank: int) -> Page | None:
        """What ``rank`` has said last."""
        return self._ranks[rank].page()
