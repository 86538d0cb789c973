"""Do unit tests notice the faults of a tool? A sample of Cosmic Ray's mutants of core modules, each with its tests.

    make mutants-by-tool

Operators, comparisons, numbers and branches of the modules in ``modules.toml`` are changed one at a time in a copy of
the tree. Prints a line for each module, and the change of each mutant that its tests let through: some of these compute
the same, the others want a test. It runs in an environment of its own, which has Cosmic Ray; the tests run in
``.venv``.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

from tests.mutants.catalogue import LISTS, source_of
from tests.mutants.trial import Workshop
from tests.support.checkout import ROOT
from tests.support.leftovers import end_leftovers

MODULES = LISTS / "modules.toml"
#: Seconds for the tests of a mutant; one that goes round for ever is noticed by that.
_LIMIT = 120.0
#: Operators whose changes are mostly of annotations, as in ``int | None``, which nothing evaluates.
_IDLE = "BitOr"


class Count(NamedTuple):
    """The mutants of a module: how many there are, were tried and were noticed."""

    module: str
    mutants: int
    tried: int
    noticed: int

    def __str__(self) -> str:
        return f"| {self.module} | {self.mutants} | {self.tried} | {self.noticed} | {self.noticed / self.tried:.0%} |"


def main(words: Sequence[str] | None = None) -> int:
    """Do what ``words`` ask for, those of the command line when None; 1 where fewer are noticed than ``--least``."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.by_tool")
    parser.add_argument("--only", nargs="+", metavar="MODULE", help="these modules")
    parser.add_argument("--sample", type=int, default=10, metavar="N", help="mutants of a module that are tried")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--least", type=float, default=0.7, help="share that must be noticed")
    asked = parser.parse_args(words)
    print("| module | mutants | tried | noticed | share |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(ROOT, Path(folder), _LIMIT)
        os.chdir(workshop.root)
        os.environ["PYTHONPATH"] = os.pathsep.join(workshop.sources())
        counts = list(_tried(workshop, asked))
    tried, noticed = (sum(each) for each in zip(*((each.tried, each.noticed) for each in counts), strict=True))
    print(f"\n{noticed} of {tried} mutants were noticed: {noticed / tried:.0%}")
    return int(noticed < asked.least * tried)


def modules() -> dict[str, list[str]]:
    """The modules that are changed, each with the tests that must notice it."""
    listed = tomllib.loads(MODULES.read_text(encoding="utf-8"))["module"]
    return {each["name"]: each["tests"] for each in listed}


def _tried(workshop: Workshop, asked: argparse.Namespace) -> Iterator[Count]:
    for name, tests in modules().items():
        if asked.only and name not in asked.only:
            continue
        everything = _mutants(source_of(name, workshop.root), workshop.place / f"{name}.sqlite")
        sample = random.Random(f"{asked.seed} {name}").sample(everything, min(asked.sample, len(everything)))
        noticed = sum(_noticed(mutant, tests) for mutant in sample)
        count = Count(name, len(everything), len(sample), noticed)
        print(count, flush=True)
        yield count


def _mutants(file: Path, session: Path) -> list[MutationSpec]:
    with use_db(session) as found:
        init([file], found, {})
        mutants = [mutant for item in found.work_items for mutant in item.mutations]
    return [mutant for mutant in mutants if _IDLE not in mutant.operator_name]


def _noticed(mutant: MutationSpec, tests: Sequence[str]) -> bool:
    """Whether ``tests`` fail with ``mutant``; where they do not, its change is printed."""
    python, mark = ROOT / ".venv/bin/python", uuid.uuid4().hex
    command = [str(python), "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    os.environ["MUTANT"] = mark
    result = mutate_and_test([mutant], shlex.join(command), _LIMIT)
    end_leftovers(f"MUTANT={mark}", patience=0.0)
    if result.test_outcome is TestOutcome.SURVIVED:
        print(result.diff, file=sys.stderr, flush=True)
    return result.test_outcome is TestOutcome.KILLED


if __name__ == "__main__":
    sys.exit(main())
