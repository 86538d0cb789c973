"""Does ``make test`` pass again and again? In random orders of files, with 2 and 4 workers, wherever it may be started.

    make series

Each run ignores SIGHUP, as under ``nohup`` and in some CI, and has the 1,024 descriptors that systems give by default.
Prints a row for each run and what failed, and exits with 1 when one did; ``python -m tests.series --count 2`` does
two. Two cores need hours.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.support.report import heading, table
from tests.series import shuffled
from tests.support.checkout import ROOT

#: Descriptors of a process by default.
DESCRIPTORS = 1024
COLUMNS = ("run", "order of files", "workers", "passed", "failed", "minutes")


class Run(NamedTuple):
    """One of the series: the number of its workers, and the seed of its order, None for the usual one."""

    workers: int
    seed: int | None

    @property
    def command(self) -> list[str]:
        """``make test`` with these workers."""
        spread = f"-n {self.workers} --dist loadfile --no-loadscope-reorder -p {shuffled.__name__}"
        return ["make", "test", f"SPREAD={spread}"]

    @property
    def environment(self) -> dict[str, str]:
        """This process's, with the seed of the order."""
        kept = {name: value for name, value in os.environ.items() if name != shuffled.SEED}
        return kept if self.seed is None else {**kept, shuffled.SEED: str(self.seed)}


def runs(count: int, first: int) -> list[Run]:
    """``count`` runs with 4 and 2 workers in turns, every other pair in a random order; seeds from ``first`` on."""
    return [Run(4 if number % 2 == 0 else 2, first + number if number // 2 % 2 else None) for number in range(count)]


def outcome(output: str) -> tuple[int, list[str]]:
    """How many tests passed by the last line of ``output``, and the lines of tests and types that failed."""
    passed = re.findall(r"^.*?(\d+) passed.* in [\d.]+s", output, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED |ERROR |Found \d+ errors? in ).*", output, re.MULTILINE)
    return int(passed[-1]) if passed else 0, failed


def rows(asked: Sequence[Run], failures: list[str]) -> Iterator[tuple[object, ...]]:
    """Do the runs ``asked`` for, a row for each as soon as it has ended; what failed goes into ``failures``."""
    for number, run in enumerate(asked, 1):
        start = time.monotonic()
        done = subprocess.run(
            run.command,
            cwd=ROOT,
            env=run.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        passed, failed = outcome(done.stdout)
        if done.returncode and not failed:
            failed = [f"make test ended with {done.returncode}", *done.stdout.splitlines()[-20:]]
        failures += [f"run {number}: {line}" for line in failed]
        order = "the usual" if run.seed is None else f"seed {run.seed}"
        yield number, order, run.workers, passed, len(failed), f"{(time.monotonic() - start) / 60:.1f}"


def main(words: Sequence[str] | None = None) -> int:
    """Do what ``words`` ask for, those of the command line when None; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.series")
    parser.add_argument("--count", type=int, default=20, help="runs")
    parser.add_argument("--seed", type=int, default=0, help="the first of the random orders")
    asked = parser.parse_args(words)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    failures: list[str] = []
    print("\n".join(heading("Repeated runs of the tests", ("make", "series"))), end="\n\n")
    for row in table(COLUMNS, rows(runs(asked.count, asked.seed), failures)):
        print(row, flush=True)
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
