"""Do the tests notice faults? Each mutant of the lists is planted in a copy of the tree, and its tests are run.

    make mutants

``python -m tests.mutants --only ID...`` tries some, ``--new`` those without a row in RESULTS.md. Prints a table, brings
RESULTS.md up to date, and exits with 1 when fewer than nine in ten are killed, or one survives that nobody explained.
Changes of operators, numbers and branches are a tool's (``by_tool``).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.catalogue import Mutant, faults, read_mutants
from tests.mutants.results import RESULTS, Results, row
from tests.mutants.trial import Result, Workshop
from tests.support.checkout import ROOT


def main(words: Sequence[str] | None = None) -> int:
    """Do what ``words`` ask for, those of the command line when None; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants")
    parser.add_argument("--new", action="store_true", help="those that were not tried yet")
    parser.add_argument("--field", action="store_true", help="those that rebuild bugs of other trainers")
    parser.add_argument("--check", action="store_true", help="only see that every mutant can still be planted")
    parser.add_argument("--trust", action="store_true", help="do not look whether tests pass without a mutant")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="mutants at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of one mutant")
    asked = parser.parse_args(words)
    mutants = list(read_mutants())
    wrong = list(faults(mutants, ROOT))
    if wrong or asked.check:
        print("\n".join([*wrong, f"{len(mutants)} mutants, {len(wrong)} faults in their lists"]))
        return 1 if wrong else 0
    results = Results.read(RESULTS)
    chosen = list(_chosen(mutants, results, asked))
    for mutant, result in _try_all(chosen, asked):
        results = Results.read(RESULTS)  # another run may have written it meanwhile
        results.add(mutant, result)
        results.write(RESULTS, mutants)
        print(row(mutant, results.of[mutant.id]), flush=True)
    return results.verdict(chosen)


def _chosen(mutants: Sequence[Mutant], results: Results, asked: argparse.Namespace) -> Iterator[Mutant]:
    if asked.only and (unknown := set(asked.only) - {mutant.id for mutant in mutants}):
        raise SystemExit(f"there is no mutant {', '.join(sorted(unknown))}")
    for mutant in mutants:
        named = not asked.only or mutant.id in asked.only
        fresh = not asked.new or mutant.id not in results.of
        rebuilt = not asked.field or bool(mutant.bug)
        if named and fresh and rebuilt:
            yield mutant


def _try_all(mutants: Sequence[Mutant], asked: argparse.Namespace) -> Iterator[tuple[Mutant, Result]]:
    """Try ``mutants``, as many at once as ``asked`` for, each in a copy of its own."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        free: SimpleQueue[Workshop] = SimpleQueue()
        for number in range(min(asked.jobs, len(mutants))):
            free.put(Workshop(ROOT, Path(folder) / str(number), asked.limit, asked.trust))

        def attempt(mutant: Mutant) -> tuple[Mutant, Result]:
            workshop = free.get()
            try:
                return mutant, workshop.try_out(mutant)
            finally:
                free.put(workshop)

        yield from pool.map(attempt, mutants)


if __name__ == "__main__":
    sys.exit(main())
