"""How long threads without work should look for some before they sleep: as OpenMP has it, as the launcher, not at all.

On a machine of our own spinning saves the time to wake them; where something else wants a core they take it away.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.single.settings import THREADS, measure_steps
from benchmarks.support.quiet import undisturbed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from megatron_run_engine.host.rank_environment import SPIN_BRIEFLY

#: Of a size: steps that are timed of one process, without ``--quick``.
STEPS = {"tiny": 100, "small": 5}
#: What is set for a process; the first is what the others are compared with.
WAYS: Mapping[str, Mapping[str, str]] = {
    "OpenMP's default": {},
    "a brief spin": {"GOMP_SPINCOUNT": SPIN_BRIEFLY},
    "asleep at once": {"OMP_WAIT_POLICY": "passive"},
}


def report(*, quick: bool) -> Iterator[str]:
    """Measure all ways alone and beside a process that keeps one core busy, and tell what was found."""
    yield "\n## Threads that wait: how long they spin\n"
    yield f"A step of {THREADS} threads, in ms; in brackets the rate, relative to {next(iter(WAYS))}.\n"
    rows = (_row(shape, busy, 1 if quick else 3) for shape in STEPS for busy in (False, True))
    yield from table(("size", "beside it", *WAYS, "samples used"), rows)


def _row(shape: str, busy: bool, turns: int) -> tuple[str, ...]:
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    job = {"shape": shape, "precision": "fp32", "samples": STEPS[shape]}
    for _ in range(turns):
        for way, steps in taken.items():
            with _neighbour(busy):
                steps.extend(on_ranks(measure_steps, 1, job, threads=THREADS, keeping=True, environment=WAYS[way]))
    kept = {way: undisturbed(steps) for way, steps in taken.items()}
    counted = taken if busy else {way: each.samples for way, each in kept.items()}
    first, *others = (1e3 * statistics.median(sample["seconds"] for sample in steps) for steps in counted.values())
    beside = "a process that computes" if busy else "nothing"
    cells = (f"{each:.1f} ({first / each:.2f})" for each in others)
    return shape, beside, f"{first:.1f}", *cells, "all" if busy else "; ".join(map(str, kept.values()))


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
