"""The share of its wall time that a run is up while a rank dies each minute."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.restart.victims import EVERY, RANKS, UNSAVED, running
from benchmarks.support.report import table

MINUTES, FEW = 60, 2
#: Steps by which an undisturbed one is measured, after those that pay for imports and the first kernels.
STEPS, FEW_STEPS, WARM = 20, 8, 2


class Productive(NamedTuple):
    """Steps that ``stayed`` and that were done ``anew``, and the ``share`` of the wall time that the first took."""

    stayed: int
    anew: int
    share: float


def productive(rows: Sequence[Mapping[str, Any]], first: int, began: float, wall: float, step: float) -> Productive:
    """What ``rows``, all steps that were done, say of the ``wall`` seconds since step ``first``, done at ``began``.

    A step that stayed counts as long as one takes that nothing disturbs, ``step`` seconds: what saves, copies and
    restarts take beside it is lost.
    """
    stayed = rows[-1]["step"] - first
    done = len([row for row in rows if row["time"] > began])
    return Productive(stayed, done - stayed, stayed * step / wall)


def effective(*, quick: bool, minutes: int | None = None) -> Iterator[str]:
    """Measure a step that nothing disturbs; then kill a rank at a random moment of each minute."""
    minutes = minutes or (FEW if quick else MINUTES)
    step = undisturbed(FEW_STEPS if quick else STEPS)
    yield (
        f"\n{RANKS} ranks, 50 M parameters; a death each minute, {minutes} minutes from the first step on; saved in "
        f"memory every {EVERY} steps. A step of a run that nobody disturbs and that saves nothing takes {step:.2f} s.\n"
    )
    columns = ("deaths", "steps that stayed", "done anew", "a step, s", "effective time")
    yield from table(columns, [_row(minutes, step)])


def undisturbed(steps: int) -> float:
    """The median seconds of so many steps of a run that saves nothing and loses no rank."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "run", UNSAVED) as run:
        run.wait_for(lambda: len(run.rows()) >= WARM + steps)
        return statistics.median(float(row["step_time_s"]) for row in run.rows()[WARM:])


def _row(minutes: int, step: float) -> tuple[str, ...]:
    draw = random.Random(2)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "run", "memory") as run:
        run.wait_for(lambda: len(run.rows()) > 1)  # the first step of all pays for imports and the first kernels
        began, first, deaths = time.time(), run.rows()[-1]["step"], 0
        for minute in range(minutes):
            death = began + 60 * (minute + 0.2 + 0.6 * draw.random())
            run.wait_for(lambda death=death: time.time() >= death)
            before = len(run.rows())
            run.strike_one(draw)
            deaths += 1
            run.wait_for(lambda before=before: len(run.rows()) > before)
        run.wait_for(lambda: time.time() >= began + 60 * minutes)
        rows, wall = run.rows(), time.time() - began
    found, own = productive(rows, first, began, wall, step), statistics.median(row["step_time_s"] for row in rows)
    return str(deaths), str(found.stayed), str(found.anew), f"{own:.2f}", f"{found.share:.1%}"
