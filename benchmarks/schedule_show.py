"""How long does a user wait for `megatron-run schedule show` of a very large pipeline? The goal is 2 s.

    python -m benchmarks.schedule_show [--quick]

Whole processes: start, generate the action lists, verify, and print, for 64 stages x 8 chunks and 512
microbatches, which are 524,288 actions. Prints wall time, and processor time, which other work on the machine does not
lengthen as much.
"""

from __future__ import annotations

import platform
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

RUNS, FEW = 7, 1
SMALL = ("--stages", "4", "--chunks", "2", "--microbatches", "8")
LARGE = ("--stages", "64", "--chunks", "8", "--microbatches", "512")
SHOW = ("-m", "megatron_run_cli", "schedule", "show", "--plugin", "schedule=interleaved")


def seconds(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Wall time and processor time of one process."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(folder: Path) -> dict[str, tuple[str, ...]]:
    """The measured commands, by its name in the table."""
    return {
        "P 4, V 2, M 8, text": (*SHOW, *SMALL),
        "P 64, V 8, M 512, text": (*SHOW, *LARGE),
        "P 64, V 8, M 512, --json": (*SHOW, *LARGE, "--json"),
        "P 64, V 8, M 512, --svg": (*SHOW, *LARGE, "--svg", str(folder / "step.svg")),
        "P 64, V 8, M 512, --trace": (*SHOW, *LARGE, "--trace", str(folder / "step.json")),
    }


def report(*, quick: bool) -> Iterator[str]:
    """How long each command takes, in turns with the others."""
    runs = FEW if quick else RUNS
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            for name, arguments in commands(Path(folder)).items():
                times.setdefault(name, []).append(seconds(arguments))
    yield f"\nPython {platform.python_version()}, {runs} runs.\n"
    columns = ("schedule show", "wall, least, s", "wall, median, s", "processor, median, s")
    yield from table(columns, (row(name, *zip(*each, strict=True)) for name, each in times.items()))


def row(name: str, wall: tuple[float, ...], processor: tuple[float, ...]) -> tuple[str, ...]:
    """A line of the table."""
    return name, *(f"{value:.2f}" for value in (min(wall), statistics.median(wall), statistics.median(processor)))


if __name__ == "__main__":
    run("schedule_show", "schedule show of a very large pipeline", __doc__ or "", report)
