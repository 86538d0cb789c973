"""The gain of the settings of glibc's allocator that the launcher makes before it starts the ranks.

They stand from the start of a process on, so both sides are processes of their own, one after the other in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.single.model import PRECISIONS, SHAPES, Precision
from benchmarks.single.ours import OurTraining
from benchmarks.support.quiet import take_sample, undisturbed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table

THREADS, WARM_UP = 2, 2


def measure_steps(shape: str, precision: Precision, samples: int) -> list[dict[str, float]]:
    """``samples`` timed steps of this project's training."""
    side = OurTraining(SHAPES[shape], precision)
    taken = [asdict(take_sample(lambda: side.step([]))) for _ in range(WARM_UP + samples)]
    side.close()
    return taken[WARM_UP:]


def report(*, quick: bool) -> Iterator[str]:
    """Measure with and without, and tell what was found."""
    yield "\n## What the launcher's settings of the allocator bring\n"
    turns, samples = (1, 3) if quick else (3, 5)
    rows = (_row(precision, turns, samples) for precision in PRECISIONS)
    yield from table(("precision", "rate, relative to glibc's defaults", "samples used"), rows)


def _row(precision: Precision, turns: int, samples: int) -> tuple[str, ...]:
    taken: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(turns):
        for keeping, steps in taken.items():
            job = {"shape": "small", "precision": precision, "samples": samples}
            steps.extend(on_ranks(measure_steps, 1, job, threads=THREADS, keeping=keeping))
    default, kept = (undisturbed(taken[keeping]) for keeping in (False, True))
    before, after = (statistics.median(sample["seconds"] for sample in side.samples) for side in (default, kept))
    return precision, f"{before / after:.2f}", f"{default}; {kept}"
