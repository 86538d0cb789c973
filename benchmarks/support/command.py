"""The command line of a benchmark: ``--quick`` for fewer samples, ``--only`` where it has several parts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from benchmarks.support.report import heading


class Part(Protocol):
    """Measures, and tells what was found, line by line."""

    def __call__(self, *, quick: bool) -> Iterator[str]:
        """``quick``: with fewer samples."""
        ...


def run(
    name: str, title: str, about: str, parts: Part | Mapping[str, Part], words: Sequence[str] | None = None
) -> None:
    """Print the results of ``benchmarks.<name>``: a heading, then what was found, each line as soon as it is there.

    ``about`` is the documentation of the benchmark, of which help shows the first line; ``words`` are those typed.
    """
    typed = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    choice = parts if isinstance(parts, Mapping) else {}
    if choice:
        parser.add_argument("--only", nargs="+", choices=choice, default=choice, metavar="PART", help=", ".join(choice))
    given = parser.parse_args(typed)
    chosen = [choice[part] for part in given.only] if isinstance(parts, Mapping) else [parts]
    for line in heading(title, (parser.prog, *typed)):
        print(line, flush=True)
    for part in chosen:
        for line in part(quick=given.quick):
            print(line, flush=True)
