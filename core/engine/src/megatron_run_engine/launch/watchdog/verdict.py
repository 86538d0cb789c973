"""From the status pages of the ranks to the one that holds up the others. Pure: no clock, no process, no file.

A rank whose page has not changed for the time limit is *stuck*. Most stuck ranks merely wait: in a collective for the
ranks that have entered fewer of its scope, in a message for its other end. Blame the stuck rank that waits for no
other, unless its last peer arrived moments ago and it has not noticed yet. While a stuck rank waits for one that makes
progress, nothing is wrong: that one is slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_run.errors import ExitCode, RankLostError
from megatron_run_engine.launch.watchdog.page import Entered, Page

#: Seconds that a rank has at least until its first step: loading libraries and connecting changes no page for long.
BEGINNING = 60.0
#: Part of the time limit for which a rank must have waited for no other before it is blamed.
_UNBLOCKED = 1 / 3
#: Ends that do not trouble the other ranks: done, or stopped after a step on which all ranks agreed.
IN_ORDER = frozenset({ExitCode.DONE, ExitCode.TIME_LIMIT, ExitCode.SIGINT, ExitCode.SIGTERM})


@dataclass(frozen=True)
class RankState:
    """One rank as the watchdog sees it.

    In seconds, counted while the watchdog itself ran: ``quiet``, since its ``page`` changed; ``stopped``, since a
    signal stopped it; ``unblocked``, since it last waited for another rank. ``page`` is None before it is known.
    ``ended``: its process has ended well.
    """

    page: Page | None
    quiet: float = 0.0
    stopped: float = 0.0
    ended: bool = False
    unblocked: float = inf


def judge(ranks: Sequence[RankState], timeout: float) -> RankLostError | None:
    """Name the rank that holds up the run, once it has done so for ``timeout`` seconds; None while there is none."""
    waits = _WaitGraph(ranks, timeout)
    stuck = waits.stuck()
    if not stuck:
        return None
    roots = waits.roots(stuck)
    guilty = [rank for rank in roots if waits.holds_up(rank)]  # the other roots make progress
    if guilty:
        return waits.clash(guilty) or waits.hung(max(sorted(guilty), key=waits.suspicion))
    return None if roots else waits.crossed(stuck)


class UnblockedTimer:
    """Counts for how long each of so many ``ranks`` has waited for no other."""

    def __init__(self, timeout: float, ranks: int) -> None:
        self._timeout, self._unblocked = timeout, [0.0] * ranks

    def update(self, passed: float, ranks: Sequence[RankState]) -> list[RankState]:
        """The ``ranks`` with the counted seconds filled in, ``passed`` seconds after the last call."""
        waits = _WaitGraph(ranks, self._timeout)
        for rank, state in enumerate(ranks):
            before = self._unblocked[rank] if state.quiet else 0.0
            self._unblocked[rank] = 0.0 if waits.awaited[rank] else before + passed
        return [replace(state, unblocked=each) for state, each in zip(ranks, self._unblocked, strict=True)]


class _WaitGraph:
    """The ranks at one moment, and which rank waits for which."""

    def __init__(self, ranks: Sequence[RankState], timeout: float) -> None:
        self._ranks, self._timeout = ranks, timeout
        self._pages = [state.page or _UNKNOWN for state in ranks]
        self._late: dict[tuple[str, range, int], tuple[list[int], frozenset[int]]] = {}
        self._unborn = [rank for rank, state in enumerate(ranks) if state.page is None]
        self.awaited = [self._waits_for(rank) for rank in range(len(ranks))]

    def is_stuck(self, rank: int) -> bool:
        state = self._ranks[rank]
        if state.page is None or state.ended:
            return False
        limit = max(self._timeout, BEGINNING) if state.page.phase == "start" else self._timeout
        return max(state.quiet, state.stopped) >= limit

    def stuck(self) -> list[int]:
        return [rank for rank in range(len(self._ranks)) if self.is_stuck(rank)]

    def roots(self, stuck: Sequence[int]) -> set[int]:
        """The ranks at the ends of the chains of waiting ranks that start at ``stuck``; none in circles."""
        reached = self._reached(stuck, through=self.is_stuck)
        return {rank for rank in reached if not self.awaited[rank] or not self.is_stuck(rank)}

    def _reached(self, starts: Sequence[int], through: Callable[[int], bool] = lambda _: True) -> set[int]:
        """``starts`` and the ranks that they wait for, directly or through others of which ``through`` is true.

        Ranks that wait in one collective share a list, which is followed once.
        """
        found, followed, todo = set(starts), set(), [*starts]
        while todo:
            here = todo.pop()
            if through(here) and id(self.awaited[here]) not in followed:
                followed.add(id(self.awaited[here]))
                fresh = [each for each in self.awaited[here] if each not in found]
                found.update(fresh)
                todo += fresh
        return found

    def holds_up(self, rank: int) -> bool:
        """Whether ``rank``, which waits for no other, is to blame."""
        state = self._ranks[rank]
        missing = state.page is None and state.quiet >= max(self._timeout, BEGINNING)
        unblocked = state.stopped > 0 or state.unblocked >= _UNBLOCKED * self._timeout
        return state.ended or missing or (self.is_stuck(rank) and unblocked)

    def suspicion(self, rank: int) -> tuple[bool, float]:
        """The most suspicious is in no message or collective, where others are involved; then the longest silent."""
        state, page = self._ranks[rank], self._pages[rank]
        return page.peer is None and page.inside is None, max(state.quiet, state.stopped)

    def hung(self, rank: int) -> RankLostError:
        """The error that names ``rank``, and one of the ranks that wait for it."""
        state = self._ranks[rank]
        if state.ended:
            what = f"rank {rank} has ended without the others"
        elif state.page is None:
            what = f"rank {rank} does not begin"
        elif state.stopped:
            what = f"rank {rank} is stopped by a signal (SIGSTOP)"
        else:
            what = f"rank {rank} hangs"
        why = f"nothing new for {max(state.quiet, state.stopped):.1f} s in {self._doing(rank)}"
        why = "it has said nothing yet" if state.page is None else why
        silent = [each for each, other in enumerate(self._ranks) if other.quiet >= self._timeout / 2]
        waiting = [each for each in silent if rank in self.awaited[each]]
        if waiting:
            first, others = waiting[0], len(waiting) - 1
            wait = f" and {others} more wait" if others else " waits"
            why += f", rank {first}{wait} for it in {self._doing(first)}"
        return RankLostError(what, why=why, fix=_FIX, rank=rank)

    def clash(self, guilty: Sequence[int]) -> RankLostError | None:
        """The error of a collective that its ranks have entered as different ones, where there is one."""
        for scope, number in filter(None, (self._pages[rank].inside for rank in guilty)):
            did = {rank: last for rank in guilty if (last := self._entered(rank, scope)).number == number}
            kinds = Counter(str(last) for last in did.values())
            if len(kinds) < 2:
                continue
            rarest = min(kinds.values())
            odd = [rank for rank, last in did.items() if kinds[str(last)] == rarest]
            entered = (f"{kind} on rank {_ranks(rank for rank in did if str(did[rank]) == kind)}" for kind in kinds)
            why = f"number {number} over {scope} is {', '.join(entered)}, in {self._pages[odd[0]].place}"
            suffix = "s" if len(odd) > 1 else ""
            what = f"rank{suffix} {_ranks(odd)} entered another collective than the others"
            return RankLostError(what, why=why, fix=_SAME, rank=odd[0])
        return None

    def crossed(self, stuck: Sequence[int]) -> RankLostError:
        """The error of ranks that wait for each other in a circle: they do not do the same things in one order."""
        circle = [rank for rank in stuck if rank in self._circle(stuck[0])] or list(stuck)
        places = "; ".join(f"rank {rank} is in {self._doing(rank)}" for rank in circle[:4])
        return RankLostError(f"ranks {_ranks(circle)} wait for each other", why=places, fix=_SAME, rank=circle[0])

    def _circle(self, start: int) -> set[int]:
        """The ranks that ``start`` waits for, directly or through others, and that wait for themselves that way."""
        reached = self._reached(self.awaited[start])
        return {rank for rank in reached if rank in self._reached(self.awaited[rank])}

    def _waits_for(self, rank: int) -> list[int]:
        """The ranks without which ``rank`` cannot go on. A stopped rank waits for none: it could not go on anyway."""
        state, page = self._ranks[rank], self._pages[rank]
        if state.ended or state.stopped >= self._timeout:
            return []
        if page.peer is not None:
            return [page.peer] if page.peer < len(self._ranks) else []
        if page.inside is not None:
            return self._behind(rank, *page.inside)
        if page.phase == "start":
            return self._unborn
        if page.ahead:
            behind = (self._behind(rank, scope, last.number) for scope, last in page.entered.items())
            return sorted({other for several in behind for other in several})
        return []

    def _behind(self, rank: int, scope: str, number: int) -> list[int]:
        """The other ranks of ``scope`` that have not entered its collective ``number``, or are stopped in it."""
        members = self._pages[rank].members.get(scope, range(0))
        if (scope, members, number) not in self._late:  # the same for all that wait there: thousands, over the world
            ranks, size = self._ranks, len(self._ranks)
            late = [
                at for at in members if at < size and (self._entered(at, scope).number < number or ranks[at].stopped)
            ]
            self._late[scope, members, number] = late, frozenset(late)
        late, known = self._late[scope, members, number]
        return [each for each in late if each != rank] if rank in known else late

    def _entered(self, rank: int, scope: str) -> Entered:
        return self._pages[rank].entered.get(scope, _NONE)

    def _doing(self, rank: int) -> str:
        """The collective that a rank is in, with the phase around it, or its phase."""
        page = self._pages[rank]
        if page.inside is None:
            return page.place
        scope, number = page.inside
        entered = self._entered(rank, scope)
        what = str(entered) if entered.number == number else "a collective"
        return f"{what}, number {number} over {scope}, in {page.place}"


#: Stands for a page that is not known yet.
_UNKNOWN = Page(changes=0, process=0, step=0, phase="nothing")
_NONE = Entered(0, 0, "")
_FIX = "see the log of that rank, or raise run.timeout if it is only slow"
_SAME = "every rank must do the same things in the same order: look for a condition that differs between ranks"


def _ranks(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
