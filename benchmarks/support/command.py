"""The command line of a benchmark: ``--quick`` for fewer samples, ``--only`` where it has several parts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.support.report import heading

#: Measures, with fewer samples where it gets ``quick``, and tells what was found, line by line.
Part = Callable[..., Iterator[str]]


class Number(NamedTuple):
    """A whole number that a ``part`` of a benchmark takes by this name; help shows what it is ``of``."""

    name: str
    part: str
    of: str


def run(
    name: str,
    title: str,
    about: str,
    parts: Part | Mapping[str, Part],
    words: Sequence[str] | None = None,
    number: Number | None = None,
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
    if number is not None:
        parser.add_argument(f"--{number.name}", type=int, metavar="N", help=f"of {number.of}")
    given = parser.parse_args(typed)
    chosen = [choice[part] for part in given.only] if isinstance(parts, Mapping) else [parts]
    if number is not None and (asked := getattr(given, number.name)) is not None:
        chosen = [partial(each, **{number.name: asked}) if each is choice[number.part] else each for each in chosen]
    for line in heading(title, (parser.prog, *typed)):
        print(line, flush=True)
    for part in chosen:
        for line in part(quick=given.quick):
            print(line, flush=True)
