"""The share of its wall time that a run is up while a rank dies each minute."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.restart.victims import EVERY, running
from benchmarks.support.report import table

MINUTES, FEW = 6, 2
WAYS = ("memory", "disk")


def effective(*, quick: bool) -> Iterator[str]:
    """Kill a rank at a random moment of each minute, and count the steps that stayed."""
    minutes = FEW if quick else MINUTES
    yield f"\nA death each minute, {minutes} minutes from the first step on; saved every {EVERY} steps.\n"
    columns = ("saved in", "deaths", "steps that stayed", "done anew", "a step, s", "effective time")
    yield from table(columns, (_row(way, minutes) for way in WAYS))


def _row(way: str, minutes: int) -> tuple[str, ...]:
    draw = random.Random(2)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "run", way) as run:
        run.wait_for(lambda: len(run.rows()) > 1)  # the first step of all pays for imports and the first kernels
        began, first, deaths = time.time(), run.rows()[-1]["step"], 0
        for minute in range(minutes):
            death = began + 60 * (minute + 0.2 + 0.6 * draw.random())
            run.wait_for(lambda death=death: time.time() >= death)
            before = len(run.rows())
            run.kill_one(draw)
            deaths += 1
            run.wait_for(lambda before=before: len(run.rows()) > before)
        run.wait_for(lambda: time.time() >= began + 60 * minutes)
        rows, wall = run.rows(), time.time() - began
    stayed, done = rows[-1]["step"] - first, len([row for row in rows if row["time"] > began])
    step = statistics.median(row["step_time_s"] for row in rows)
    share = stayed * step / wall
    return way, str(deaths), str(stayed), str(done - stayed), f"{step:.2f}", f"{share:.1%}"
