"""What it brings that threads without work sleep, as the launcher has them, where OpenMP would let them spin.

On a machine of our own spinning saves the time to wake them; where something else wants a core they take it away.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.single.settings import THREADS, measure_steps
from benchmarks.support.quiet import undisturbed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table

#: Of a size: steps that are timed of one process, without ``--quick``.
STEPS = {"tiny": 100, "small": 5}
COLUMNS = ("size", "beside it", "step spinning, ms", "sleeping, ms", "rate, relative to spinning", "samples used")


def report(*, quick: bool) -> Iterator[str]:
    """Measure both alone and beside a process that keeps one core busy, and tell what was found."""
    yield "\n## Threads that wait: asleep or spinning\n"
    turns = 1 if quick else 3
    rows = (_row(shape, busy, turns) for shape in STEPS for busy in (False, True))
    yield from table(COLUMNS, rows)


def _row(shape: str, busy: bool, turns: int) -> tuple[str, ...]:
    taken: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(turns):
        for sleeping, steps in taken.items():
            job = {"shape": shape, "precision": "fp32", "samples": STEPS[shape]}
            with _neighbour(busy):
                steps.extend(on_ranks(measure_steps, 1, job, threads=THREADS, keeping=True, sleeping=sleeping))
    used = "all" if busy else "; ".join(str(undisturbed(steps)) for steps in taken.values())
    kept = {sleeping: steps if busy else undisturbed(steps).samples for sleeping, steps in taken.items()}
    spun, slept = (statistics.median(sample["seconds"] for sample in kept[sleeping]) for sleeping in (False, True))
    beside = "a process that computes" if busy else "nothing"
    return shape, beside, f"{1e3 * spun:.1f}", f"{1e3 * slept:.1f}", f"{spun / slept:.2f}", used


@contextmanager
def _neighbour(busy: bool) -> Iterator[None]:
    """A process that keeps one core busy meanwhile, if ``busy``."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"])] if busy else []
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
