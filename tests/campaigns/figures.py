"""What a campaign finds: how often something was tried, how often it went as promised, and what did not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field


@dataclass
class Figures:
    """One row of the table: ``tried`` times ``what``; ``faults`` are a line each, and end the program with 1."""

    what: str
    tried: int = 0
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def held(self) -> int:
        """How often it went as promised."""
        return self.tried - len(self.faults)

    @property
    def row(self) -> tuple[str, str, str, str]:
        """As cells of the table."""
        return self.what, f"{self.held} of {self.tried}", f"{self.seconds:.0f} s", "; ".join(self.notes)


def campaign(what: str, trial: Callable[[int], Sequence[str]], seeds: Iterable[int], jobs: int = 1) -> Figures:
    """Do ``trial`` with each seed, ``jobs`` at a time; a trial returns what went wrong in it, or raises that."""

    def attempt(seed: int) -> Sequence[str]:
        try:
            return trial(seed)
        except Exception as error:
            return [f"seed {seed}: {type(error).__name__}: {error}"]

    start = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(attempt, seeds))
    figures = Figures(what, len(results), ["; ".join(faults) for faults in results if faults])
    figures.seconds = time.perf_counter() - start
    return figures


def some(count: int, share: float) -> range:
    """So much of ``range(count)``, spread over all of it; one at least."""
    return range(0, count, max(1, round(1 / share)))
