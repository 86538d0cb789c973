"""When local ranks are started again after one was lost, with how many, and what is started then.

Of a run with ``run.elastic`` a rank's *place* is its local number in full strength, which chooses its GPU. A place at
which a rank is lost twice before a new step is done is taken for gone: the ranks that are left train on, as far as they
fit. Once an attempt has made progress all are tried again, but for those that the run folder excludes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.failures import last_saved
from megatron_run_engine.run_folder.excluded import NAME, Excluded, read_excluded, remaining

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.launch.job import Lost, RunResult

#: Losses at one place before a new step is done that make it gone: the first may have been chance.
_CHANCES = 2


@dataclass
class Restarts:
    """Counts the starts of one run after its first, ``most`` of them, and knows the places that are left of ``full``.

    Without ``elastic`` all are taken each time. ``places`` are those of the ranks that run now, and ``excluded`` those
    that ``excluded.json`` in the run folder names, whatever progress is made.
    """

    most: int
    full: int = 1
    elastic: bool = False
    used: int = 0
    places: Sequence[int] = ()
    excluded: Sequence[int] = ()
    _gone: set[int] = field(default_factory=set)
    _lost: Counter[int] = field(default_factory=Counter)
    _begun: int = 0
    _barren: bool = False

    @property
    def left(self) -> tuple[int, ...]:
        """The places that are neither gone nor excluded."""
        return tuple(place for place in range(self.full) if place not in {*self._gone, *self.excluded})

    def leave_out(self, folder: Path | None) -> str:
        """Leave out the places of this host that the run ``folder`` excludes: a line on them, where they have changed.

        Raises :class:`megatron_run.errors.InputError` where none is left, and for a record that cannot be read.
        """
        here = [Excluded(gethostname(), place) for place in range(self.full)]
        listed = () if folder is None else read_excluded(folder.expanduser().absolute())
        left = remaining(listed if self.elastic else (), here)
        before, self.excluded = self.excluded, [place for place in range(self.full) if place not in left]
        named = [each.named for each in here if each.at in {entry.at for entry in listed}]
        if not named or (self.elastic and self.excluded == before):
            return ""
        who = " and ".join(named)
        if not self.elastic:
            return f"{NAME} in the run folder names {who}, which run.elastic=off takes all the same"
        return f"{NAME} in the run folder leaves out {who}, until it is taken out there"

    def next(self, result: RunResult, in_memory: int | None = None) -> str | None:
        """Count one more start after ``result``: the line to print, or None to stop here.

        ``in_memory`` is the newest step there, if it is newer than those on disk.

        Only a lost rank is a reason to start again: a signal or a time limit asked for the end, and after every other
        code the next start would end alike. So it would when a rank is lost twice in a row before a step is done,
        unless the others can do without it.
        """
        if result.code != ExitCode.RANK_LOST or self.used >= self.most:
            return None
        ranks = self._count(result)
        if ranks is None or not self.left:
            return None
        self.used += 1
        lost = result.message or f"ended with exit code {int(result.code)}"
        step = last_saved(result.folder)
        start = "from the first step" if step is None else f"from step {step}"
        start = start if in_memory is None else f"from step {in_memory} in memory"
        return f"{lost}; starting again, {self.used} of {self.most}, {start}{ranks}{_times(result.lost)}"

    def _count(self, result: RunResult) -> str | None:
        """Count the loss; what the line says of the ranks, or None where the same would happen again."""
        barren, self._barren = self._barren, result.steps == 0
        again, self._begun = 0 < result.begun <= self._begun, max(self._begun, result.begun)
        if not self._barren and not (again and self.elastic and result.rank is not None):
            returned = bool(self._gone)
            self._gone.clear()
            self._lost.clear()
            return f", on all {len(self.left)} ranks again" if returned else ""
        if not self.elastic or result.rank is None:
            return None if barren else ""
        place = self.places[result.rank] if self.places else result.rank
        self._lost[place] += 1
        if self._lost[place] < _CHANCES:
            return ""
        self._gone.add(place)
        return f", without local rank {place}, which was lost {_CHANCES} times before a new step was done"


def _times(lost: Lost | None) -> str:
    """How long it took to see that a rank was ``lost``, and until all had ended."""
    if lost is None:
        return ""
    seen, gone = lost.detected - lost.died, lost.ended - lost.detected
    return f" (seen after {seen:.2f} s, all ranks gone {gone:.2f} s later)"


def resumed(run: ResolvedRun, folder: Path) -> ResolvedRun:
    """``run`` changed to resume in ``folder`` from its newest saved step, whatever it asked for."""
    section = run.config.run.model_copy(update={"folder": folder})
    config, request = run.config.model_copy(update={"run": section}), replace(run.request, resume="auto")
    return replace(run, config=config, request=request)
