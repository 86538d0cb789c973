"""When local ranks are started again after one was lost, and what is started then.

Pure, but for where the saved steps lie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.failures import last_saved
from megatron_run_engine.launch.results import RunResult

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run.planning import ResolvedRun


@dataclass
class Restarts:
    """Counts the starts of one run after its first, ``most`` of them."""

    most: int
    used: int = 0
    _barren: bool = False

    def next(self, result: RunResult) -> str | None:
        """Count one more start after ``result``: the line to print, or None to stop here.

        Only a lost rank is a reason to start again: a signal or a time limit asked for the end, and after every other
        code the next start would end alike. So it would when a rank is lost twice in a row before a step is done.
        """
        barren, self._barren = self._barren, result.steps == 0
        if result.code != ExitCode.RANK_LOST or self.used >= self.most or (barren and self._barren):
            return None
        self.used += 1
        lost = result.message or f"ended with exit code {int(result.code)}"
        step = last_saved(result.folder)
        start = "from the first step" if step is None else f"from step {step}"
        return f"{lost}; starting again, {self.used} of {self.most}, {start}"


def resumed(run: ResolvedRun, request: Request, folder: Path) -> tuple[ResolvedRun, Request]:
    """``run`` and ``request`` changed to resume in ``folder`` from its newest saved step, whatever they asked for."""
    section = run.config.run.model_copy(update={"folder": folder})
    request = replace(request, resume="auto")
    return replace(run, config=run.config.model_copy(update={"run": section}), request=request), request
