"""Which rank's end was the first cause, and the one line that says so. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.job import Report


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``status`` as :class:`subprocess.Popen` gives it, negative for a signal; ``order`` counts ends as they were seen;
    ``killed`` is true when the launcher killed it because another had failed; ``log`` is what it printed, and ``place``
    what it was doing, where it said so.
    """

    rank: int
    status: int
    order: int
    log: Path
    report: Report | None = None
    killed: bool = False
    place: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ended with anything but success."""
        return self.status != 0

    @property
    def code(self) -> ExitCode:
        """The documented exit code: a signal is a lost rank, an unknown status a bug."""
        if self.status < 0:
            return ExitCode.RANK_LOST
        try:
            return ExitCode(self.status)
        except ValueError:
            return ExitCode.BUG

    @property
    def secondary(self) -> bool:
        """Whether it ended because another rank did: never the first cause when there is any other."""
        return self.status == ExitCode.RANK_LOST if self.report is None else self.report.secondary


def first_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The failed rank that brought down the others, or None when all went well.

    Where all that failed miss another, as when one hangs, it is the one that misses a rank which said nothing: the
    others miss ranks that ended because of it.
    """
    failed = [end for end in ends if end.failed]
    silent = {end.rank for end in failed if end.report is None}

    def precedence(end: RankEnd) -> tuple[bool, bool, bool, int, int]:
        hearsay = end.secondary and _missed(end) not in silent
        return end.killed, end.secondary, hearsay, end.order, end.rank

    return min(failed, key=precedence, default=None)


def describe(cause: RankEnd, ends: Sequence[RankEnd]) -> str:
    """One line: what happened, on which rank, and where it is written; then the ranks that did not end by themselves.

    A message of several lines (several problems found at once) keeps them.
    """
    alone = len(ends) == 1
    where = f"log: {cause.log}" if alone else f"rank {cause.rank}, log: {cause.log}"
    killed = [str(end.rank) for end in ends if end.killed]
    many, were = ("s", "were") if len(killed) > 1 else ("", "was")
    silent = f"; rank{many} {', '.join(killed)} did not end and {were} killed" if killed and cause.secondary else ""
    first, *others = _reason(cause).splitlines() or [""]
    return "\n".join([f"{first} ({where}){silent}{_testimony(cause, ends)}", *others])


def _reason(cause: RankEnd) -> str:
    where = f" in {cause.place}" if cause.place else ""
    if cause.status < 0:
        return f"a rank was killed by {_signal_name(-cause.status)}{where}"
    if cause.report is not None:
        return cause.report.message
    line = last_line(cause.log)
    return f"a rank ended with exit code {cause.status}{where}" + (f": {line}" if line else "")


def _testimony(cause: RankEnd, ends: Sequence[RankEnd]) -> str:
    """What the first rank that missed ``cause`` said of it, when that one said nothing itself, nor its page."""
    reports = [end.report for end in sorted(ends, key=lambda end: end.order) if end.report is not None]
    missed = [report.message for report in reports if report.lost == cause.rank]
    return f"; {missed[0]}" if missed and cause.report is None and not cause.place else ""


def _missed(end: RankEnd) -> int | None:
    """The rank whose loss ended this one, where it could say."""
    return None if end.report is None else end.report.lost


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(log: Path, window: int = 8192) -> str:
    """The last line of ``log`` that is not empty, as far as its last ``window`` bytes tell."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - window))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def count_warnings(log: Path) -> tuple[int, str]:
    """How many lines of ``log`` are warnings, and the first of them."""
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            found = [line.strip() for line in lines if "Warning:" in line or line.startswith(("WARNING", "warning:"))]
    except OSError:
        return 0, ""
    return len(found), found[0] if found else ""
