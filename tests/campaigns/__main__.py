"""Campaigns against the promises of docs/reliability.md: hundreds of kills, signals, damages, and malformed inputs.

    make campaigns

Prints a table of markdown, and exits with 1 when a promise was broken. ``python -m tests.campaigns --only kills`` does
one of them; ``--seed`` begins elsewhere. Two cores need some minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from benchmarks.support.report import heading, table
from tests.campaigns.around_commands import around_commands
from tests.campaigns.attacks import floods, prepared, starts
from tests.campaigns.damage import crash_points, flips
from tests.campaigns.elastic import elastic
from tests.campaigns.figures import Figures
from tests.campaigns.folders import folders
from tests.campaigns.fuzz import fuzz_all
from tests.campaigns.hangs import flipped_replicas, hangs, slow_steps
from tests.campaigns.kills import kills
from tests.campaigns.kills_between import kills_between
from tests.campaigns.malformed import damaged_runs, malformed
from tests.campaigns.numbers import numbers
from tests.campaigns.public_tokenizers import packages
from tests.campaigns.special import special
from tests.campaigns.stops import stops
from tests.campaigns.surroundings import surroundings
from tests.campaigns.written import disturbed

#: What each campaign needs: a folder, a first seed, how many runs there may be at once, and the share of it to do.
Campaign = Callable[[Path, int, int, float], Iterable[Figures]]
CAMPAIGNS: dict[str, Campaign] = {
    "kills": lambda folder, seed, jobs, share: [kills(folder, _some(200, share), seed, jobs)],
    "kills-between": lambda folder, seed, jobs, share: [kills_between(folder, _some(40, share), seed, jobs)],
    "elastic": lambda folder, seed, jobs, share: [elastic(folder, _some(200, share), seed, jobs)],
    "crash-points": lambda folder, seed, jobs, share: [crash_points(folder, share)],
    "flips": lambda folder, seed, jobs, share: [flips(folder, _some(1000, share), seed)],
    "stops": lambda folder, seed, jobs, share: [stops(folder, _some(50, share), seed, jobs)],
    "hangs": lambda folder, seed, jobs, share: [hangs(folder, _some(50, share), seed, jobs)],
    "slow": lambda folder, seed, jobs, share: [slow_steps(folder, _some(1000, share), seed)],
    "replicas": lambda folder, seed, jobs, share: [flipped_replicas(folder, _some(20, share), seed, jobs)],
    "malformed": lambda folder, seed, jobs, share: [malformed(folder / "inputs", share), damaged_runs(folder, share)],
    "attacks": lambda folder, seed, jobs, share: [
        *(each(_made(folder / each.__name__), share) for each in (prepared, starts)),
        floods(_some(100, share), seed),
    ],
    "surroundings": surroundings,
    "commands": lambda folder, seed, jobs, share: chain(
        disturbed(_made(folder / "disturbed"), seed, jobs, share),
        around_commands(_made(folder / "around"), jobs, share),
    ),
    "folders": lambda folder, seed, jobs, share: folders(folder / "folders", _some(300, share), seed),
    "numbers": lambda folder, seed, jobs, share: numbers(folder, share, seed, jobs),
    "special": lambda folder, seed, jobs, share: special(folder, share, seed, jobs),
    "fuzz": lambda folder, seed, jobs, share: fuzz_all(folder, _some(100_000, share), seed, jobs),
}
#: The campaign that needs packages of other people, and a network if they are not there: only where it is asked for.
PACKAGES = "packages"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _some(count: int, share: float) -> int:
    return max(1, round(count * share))


def main(words: Sequence[str] | None = None) -> int:
    """Do what ``words`` ask for, those of the command line when None; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns")
    parser.add_argument("--only", nargs="+", choices=[*CAMPAIGNS, PACKAGES], default=list(CAMPAIGNS))
    where = "where the packages of that campaign lie, and are downloaded to"
    parser.add_argument("--packages", type=Path, metavar="FOLDER", default=Path("packages"), help=where)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--share", type=float, default=1.0, help="how much of each to do, 1 is all")
    asked = parser.parse_args(words)
    print("\n".join(heading("Reliability", ("make", "campaigns"))), end="\n\n")
    faults: list[str] = []
    for row in table(("what was tried", "as promised", "took", "and"), _rows(asked, faults)):
        print(row, flush=True)
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


def _rows(asked: argparse.Namespace, faults: list[str]) -> Iterator[tuple[str, ...]]:
    """A row for each finding, as soon as it is there; what was not as promised goes into ``faults``."""

    def public(folder: Path, seed: int, _: int, share: float) -> Iterable[Figures]:
        return packages(folder / PACKAGES, asked.packages.expanduser(), _some(3000, share), seed)

    campaigns = {**CAMPAIGNS, PACKAGES: public}
    for name in asked.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for figures in campaigns[name](Path(folder), asked.seed, asked.jobs, asked.share):
                faults += figures.faults
                yield figures.row


if __name__ == "__main__":
    sys.exit(main())
