"""How long does a user wait for a run to start? Local ranks forked from one process, and each started anew.

    python -m benchmarks.startup [--quick]

Whole commands: `megatron-run preset:tiny` on 1, 2 and 16 ranks of the CPU, two steps each, in turns, both ways. Prints
wall time, and processor time, which other work on the machine does not lengthen as much. The goal is 8 s for sixteen
ranks on two cores.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.command import run
from benchmarks.support.report import table

RANKS = (1, 2, 16)
WAYS = ("auto", "spawn")
GOAL, GOAL_RANKS = 8.0, 16
#: A data-parallel model of some thousand parameters, so that the start is what takes time.
RUN = ("preset:tiny", "--plugin", "schedule=gpipe", "--set", "parallel.pipeline=1", "--set", "train.steps=2")
SETTINGS = ("run.device=cpu", "eval.interval=0", "train.global_batch_size=32", "train.micro_batch_size=1")


def seconds(ranks: int, way: str) -> tuple[float, float]:
    """Wall time and processor time of one command with all its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (*SETTINGS, f"run.start_method={way}", f"run.folder={Path(folder) / 'run'}")
        arguments = [*RUN, "--nproc", str(ranks), *(argument for each in settings for argument in ("--set", each))]
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "megatron_run_cli", *arguments], check=True, capture_output=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def report(*, quick: bool) -> Iterator[str]:
    """Measure both ways on each number of ranks, twice or seven times."""
    runs = 2 if quick else 7
    columns = ("ranks", "way", "wall, least, s", "wall, median, s", "processor, median, s", "goal", "met")
    yield from table(columns, (row for ranks in RANKS for row in _rows(ranks, runs)))


def _rows(ranks: int, runs: int) -> Iterator[tuple[str, ...]]:
    measured = [{way: seconds(ranks, way) for way in WAYS} for _ in range(runs)]
    for way in WAYS:
        walls, processors = zip(*(each[way] for each in measured), strict=True)
        wall = statistics.median(walls)
        judged = ranks == GOAL_RANKS and way == "auto"
        goal = (f"at most {GOAL:g} s", "yes" if wall <= GOAL else "no") if judged else ("", "")
        name = "forked" if way == "auto" else "each anew"
        yield str(ranks), name, f"{min(walls):.1f}", f"{wall:.1f}", f"{statistics.median(processors):.1f}", *goal


if __name__ == "__main__":
    run("startup", "Start-up", __doc__, report)
