"""Runs of a grid beside those that they must equal: where numbers differ, and a table by feature."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from tests.support.training import Seen


class Row(Hashable, Protocol):
    """One run of a grid."""

    @property
    def feature(self) -> str:
        """The name of what it shows."""


Split = TypeVar("Split", bound=Row)


class Outcome(Protocol):
    """What became of a run."""

    @property
    def split(self) -> Any:
        """The run."""

    def faults(self, other: Self, /) -> Iterator[str]:
        """Where it differs from the ``other``."""


Found = TypeVar("Found", bound=Outcome)


def other_numbers(
    split: object, found: Seen, wanted: Seen, tolerances: Mapping[str, float], *, equal_nan: bool = False
) -> Iterator[str]:
    """The lists of numbers in which two runs differ by more than the relative ``tolerances``."""
    for name, tolerance in tolerances.items():
        here, there = (np.array(getattr(each, name)) for each in (found, wanted))
        if here.shape != there.shape or not np.allclose(here, there, rtol=tolerance, atol=0, equal_nan=equal_nan):
            yield f"{split}: {name} are {here}, not {there}"


def compare(
    splits: Sequence[Split],
    train: Callable[[Sequence[Split]], Iterable[Found]],
    reference: Callable[[Split], Split],
    features: Iterable[str],
    like: str,
) -> int:
    """Train ``splits`` and their references, and print what differs and a table; returns the exit code.

    ``like`` heads the column of those that are as the reference.
    """
    start, wrong, faults = time.perf_counter(), set[Split](), 0
    wanted = {each.split: each for each in train(list(dict.fromkeys(map(reference, splits))))}
    for number, each in enumerate(train(splits), 1):
        # At once: a grid that is stopped has shown what it found.
        for fault in each.faults(wanted[reference(each.split)]):
            print(fault, file=sys.stderr, flush=True)
            wrong.add(each.split)
            faults += 1
        if number % 20 == 0:
            print(f"{number} of {len(splits)}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    tried, bad = (Counter(split.feature for split in some) for some in (splits, wrong))
    print(f"| feature | runs | {like} |\n|---|---|---|")
    for feature in features:
        if tried[feature]:
            print(f"| {feature} | {tried[feature]} | {tried[feature] - bad[feature]} |")
    print(f"\n- runs: {len(splits)}, of which differ: {len(wrong)}\n- faults: {faults}")
    print(f"- wall time: {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0
