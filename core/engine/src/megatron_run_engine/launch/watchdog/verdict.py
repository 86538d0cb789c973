"""From what the watched ranks say to who holds up the others. Pure: no clock, no process, no file.

A rank that has said nothing new for the time limit is *stuck*. Most of the stuck ones merely wait: in a collective for
the ranks that have entered fewer of its scope, in a message for its other end. Whoever is stuck and waits for nobody is
the one to name, unless it was let go only just now: the last of the others has come, and it has not noticed yet. While
a stuck rank waits for one that goes on, nothing is wrong: that one is slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_run.errors import RankLostError
from megatron_run_engine.launch.watchdog.page import Entered, Page

#: Seconds that a rank has at least until its first step: libraries are loaded and connections made, step by big step.
BEGINNING = 60.0
#: Of the time limit: for so long a rank that is named has waited for nobody.
_ALONE = 1 / 3


@dataclass(frozen=True)
class Seen:
    """One rank as its watcher sees it.

    ``quiet`` are the seconds for which it has said nothing new, ``stopped`` those for which it has been stopped by a
    signal, and ``alone`` those for which it has waited for nobody, all as long as the watcher itself ran; ``page`` is
    what it said last, None before that is known. ``ended``: its process has ended well.
    """

    page: Page | None
    quiet: float = 0.0
    stopped: float = 0.0
    ended: bool = False
    alone: float = inf


def judge(ranks: Sequence[Seen], timeout: float) -> RankLostError | None:
    """Name the rank that holds up the run, once it has done so for ``timeout`` seconds; None while there is none."""
    case = _Case(ranks, timeout)
    stuck = case.stuck()
    if not stuck:
        return None
    roots = {rank for each in stuck for rank in case.roots(each)}
    guilty = [rank for rank in roots if case.holds_up(rank)]
    if guilty:
        return case.clash(guilty) or case.hung(max(sorted(guilty), key=case.suspicion))
    return None if roots else case.crossed(stuck)


class Waits:
    """Counts, look by look, for how long each of so many ``ranks`` has waited for nobody."""

    def __init__(self, timeout: float, ranks: int) -> None:
        self._timeout, self._alone = timeout, [0.0] * ranks

    def after(self, passed: float, ranks: Sequence[Seen]) -> list[Seen]:
        """The ``ranks`` as they are ``passed`` seconds after the last look, with what has been counted."""
        case = _Case(ranks, self._timeout)
        for rank, seen in enumerate(ranks):
            before = self._alone[rank] if seen.quiet else 0.0
            self._alone[rank] = 0.0 if case.awaited(rank) else before + passed
        return [replace(seen, alone=alone) for seen, alone in zip(ranks, self._alone, strict=True)]


class _Case:
    """The ranks at one moment, and who waits for whom."""

    def __init__(self, ranks: Sequence[Seen], timeout: float) -> None:
        self._ranks, self._timeout = ranks, timeout
        self._awaited = {rank: self._waits_for(rank) for rank in range(len(ranks))}

    def is_stuck(self, rank: int) -> bool:
        seen = self._ranks[rank]
        if seen.page is None or seen.ended:
            return False
        limit = max(self._timeout, BEGINNING) if seen.page.phase == "start" else self._timeout
        return max(seen.quiet, seen.stopped) >= limit

    def holds_up(self, rank: int) -> bool:
        """Whether ``rank``, which waits for nobody, is why others do not go on."""
        seen = self._ranks[rank]
        if seen.ended or self.is_missing(rank):
            return True
        return self.is_stuck(rank) and (seen.stopped > 0 or seen.alone >= _ALONE * self._timeout)

    def awaited(self, rank: int) -> Sequence[int]:
        """Whom ``rank`` waits for."""
        return self._awaited[rank]

    def is_missing(self, rank: int) -> bool:
        seen = self._ranks[rank]
        return seen.page is None and seen.quiet >= max(self._timeout, BEGINNING)

    def stuck(self) -> list[int]:
        return [rank for rank in range(len(self._ranks)) if self.is_stuck(rank)]

    def roots(self, rank: int) -> set[int]:
        """The ranks at the end of the chains of those that wait for each other; none where they go round."""
        found, followed, todo = set(), {rank}, [rank]
        while todo:
            here = todo.pop()
            if not self._awaited[here] or not self.is_stuck(here):
                found.add(here)
                continue
            todo += [each for each in self._awaited[here] if each not in followed]
            followed.update(self._awaited[here])
        return found

    def suspicion(self, rank: int) -> tuple[bool, float]:
        """How likely ``rank`` is what the others wait for: rather one that is in nothing that takes several."""
        seen = self._ranks[rank]
        alone = seen.page is None or (seen.page.peer is None and seen.page.inside is None)
        return alone, max(seen.quiet, seen.stopped)

    def hung(self, rank: int) -> RankLostError:
        """The error that names ``rank``, and one of those that wait for it."""
        seen = self._ranks[rank]
        silent = [each for each, other in enumerate(self._ranks) if other.quiet >= self._timeout / 2]
        waiting = [each for each in silent if rank in self._awaited[each]]
        why = [self._silence(rank), self._witness(waiting)]
        if seen.ended:
            what = f"rank {rank} has ended without the others"
        elif seen.page is None:
            what = f"rank {rank} does not begin"
        elif seen.stopped:
            what = f"rank {rank} is stopped by a signal (SIGSTOP)"
        else:
            what = f"rank {rank} hangs"
        return RankLostError(what, why=", ".join(filter(None, why)), fix=_FIX, rank=rank)

    def clash(self, guilty: Sequence[int]) -> RankLostError | None:
        """The error of a collective that all its ranks have entered, and some as another one, where there is one."""
        for scope, number in filter(None, (self._inside(rank) for rank in guilty)):
            did = {rank: last for rank in guilty if (last := self._entered(rank, scope)).number == number}
            kinds = Counter(str(last) for last in did.values())
            if len(kinds) < 2:
                continue
            rarest = min(kinds.values())
            odd = [rank for rank, last in did.items() if kinds[str(last)] == rarest]
            told = (f"{kind} on rank {_ranks(rank for rank in did if str(did[rank]) == kind)}" for kind in kinds)
            why = f"number {number} over {scope} is {', '.join(told)}, in {self._place(odd[0])}"
            many = "s" if len(odd) > 1 else ""
            what = f"rank{many} {_ranks(odd)} entered another collective than the others"
            return RankLostError(what, why=why, fix=_SAME, rank=odd[0])
        return None

    def crossed(self, stuck: Sequence[int]) -> RankLostError:
        """The error of ranks that wait for each other in a circle: they do not do the same things in the same order."""
        circle = [rank for rank in stuck if rank in self._circle(stuck[0])] or list(stuck)
        places = "; ".join(f"rank {rank} is in {self._doing(rank)}" for rank in circle[:4])
        named = ", ".join(map(str, circle))
        return RankLostError(f"ranks {named} wait for each other", why=places, fix=_SAME, rank=circle[0])

    def _circle(self, start: int) -> set[int]:
        """The ranks that can be reached from ``start`` and reach each other."""

        def reached(rank: int) -> set[int]:
            found: set[int] = set()
            todo = [rank]
            while todo:
                fresh = [each for each in self._awaited[todo.pop()] if each not in found]
                found.update(fresh)
                todo += fresh
            return found

        return {rank for rank in reached(start) if rank in reached(rank)}

    def _waits_for(self, rank: int) -> list[int]:
        """The ranks without which ``rank`` cannot go on; a rank that is stopped could not either way."""
        seen = self._ranks[rank]
        if seen.page is None or seen.ended or seen.stopped >= self._timeout:
            return []
        if seen.page.peer is not None:
            return [seen.page.peer] if seen.page.peer < len(self._ranks) else []
        if seen.page.inside is not None:
            scope, number = seen.page.inside
            return self._behind(rank, scope, number)
        if seen.page.phase == "start":
            return [other for other, each in enumerate(self._ranks) if each.page is None]
        if seen.page.ahead:
            behind = (self._behind(rank, scope, last.number) for scope, last in seen.page.entered.items())
            return sorted({other for several in behind for other in several})
        return []

    def _behind(self, rank: int, scope: str, number: int) -> list[int]:
        """The other ranks of ``scope`` that have not entered its collective ``number``, or are stopped in it."""
        page = self._ranks[rank].page
        members = page.members.get(scope, ()) if page is not None else ()
        others = [each for each in members if each != rank and each < len(self._ranks)]
        return [each for each in others if not self._is_in(each, scope, number)]

    def _is_in(self, rank: int, scope: str, number: int) -> bool:
        return self._entered(rank, scope).number >= number and not self._ranks[rank].stopped

    def _inside(self, rank: int) -> tuple[str, int] | None:
        page = self._ranks[rank].page
        return None if page is None else page.inside

    def _place(self, rank: int) -> str:
        page = self._ranks[rank].page
        return "nothing" if page is None else page.place

    def _entered(self, rank: int, scope: str) -> Entered:
        page = self._ranks[rank].page if rank < len(self._ranks) else None
        return (page.entered if page is not None else _NOTHING).get(scope, _NONE)

    def _silence(self, rank: int) -> str:
        seen = self._ranks[rank]
        if seen.page is None:
            return "it has said nothing yet"
        return f"nothing new for {max(seen.quiet, seen.stopped):.1f} s in {self._doing(rank)}"

    def _doing(self, rank: int) -> str:
        """What a rank is in: its collective, with the phase around it, or its phase."""
        page = self._ranks[rank].page
        if page is None:
            return "nothing"
        if page.inside is None:
            return page.place
        scope, number = page.inside
        entered = self._entered(rank, scope)
        what = str(entered) if entered.number == number else "a collective"
        return f"{what}, number {number} over {scope}, in {page.place}"

    def _witness(self, waiting: Sequence[int]) -> str:
        if not waiting:
            return ""
        first, others = waiting[0], len(waiting) - 1
        more = f" and {others} more" if others else ""
        return f"rank {first}{more} wait{'s' if not others else ''} for it in {self._doing(first)}"


_NOTHING: Mapping[str, Entered] = {}
_NONE = Entered(0, 0, "")
_FIX = "see the log of that rank, or raise run.timeout if it is only slow"
_SAME = "every rank must do the same things in the same order: look for a condition that differs between ranks"


def _ranks(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
