"""Local ranks that are started again by themselves, once a rank was lost. Pure, but for where the saved steps lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.job import Ending
from megatron_run_engine.launch.saved import last_saved

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run.planning import ResolvedRun


@dataclass
class Restarts:
    """Counts the starts of one run after its first, ``most`` of them."""

    most: int
    used: int = 0
    _barren: bool = False

    def next(self, ending: Ending) -> str | None:
        """Count one more start after ``ending``: the line that says so, None where another start is not tried.

        It is after a rank was lost: a signal or a time limit asked for the end, and every other code says that the next
        start would end alike. So does a rank that is lost twice in a row before a step is done.
        """
        barren, self._barren = self._barren, ending.steps == 0
        if ending.code != ExitCode.RANK_LOST or self.used >= self.most or (barren and self._barren):
            return None
        self.used += 1
        lost = ending.message or f"ended with exit code {int(ending.code)}"
        return f"{lost}; starting again, {self.used} of {self.most}, {_from(ending.folder)}"


def going_on(run: ResolvedRun, request: Request, folder: Path) -> tuple[ResolvedRun, Request]:
    """What to start in order to go on in ``folder`` from what was saved there last, whatever the first start was to."""
    section = run.config.run.model_copy(update={"folder": folder})
    request = replace(request, resume="auto")
    return replace(run, config=run.config.model_copy(update={"run": section}), request=request), request


def _from(folder: Path | None) -> str:
    step = last_saved(folder)
    return "from the first step" if step is None else f"from step {step}"
