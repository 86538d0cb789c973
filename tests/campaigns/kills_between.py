"""Ranks killed at random, in runs that go on with another optimizer: to the bit as one that nothing disturbed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_run.config.request import Request
from tests.campaigns.figures import Figures, campaign
from tests.campaigns.kills import LAST, WORLD, Attempts, Kills
from tests.support.forked import learned, run_forked, tiny

#: Values that make the order of all sums that of the others too: each gradient is reduced once, in a bucket of its own.
SETS: Mapping[str, Any] = {"train.steps": LAST, "optimizer.bucket_size": 1, "train.precision": "bf16"}
_LENT = {"optimizer.use": "zero3", "optimizer.reduce": "step", "optimizer.whole_below": 0}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"optimizer.use": "adamw"},
    "zero1": {"optimizer.use": "zero1"},
    "zero3": _LENT,
    "zero3, all held": {**_LENT, "optimizer.segments_held": 0},
}
ON_HOST: Mapping[str, Any] = {"optimizer.state_on_host": True}
#: All that a run may begin with, or go on with.
CHOICES: Mapping[str, Mapping[str, Any]] = {
    f"{name}{', on the host' * bool(host)}": {**chosen, **host}
    for name, chosen in OPTIMIZERS.items()
    for host in ({}, ON_HOST)
}


def request(folder: Path, choice: str) -> Request:
    """Four data-parallel ranks, every step saved."""
    return tiny(folder, {**SETS, **CHOICES[choice]}, nproc=WORLD)


class KillsBetween(Kills):
    """Trials whose second attempt has another optimizer than the first.

    All optimizers learn the same numbers; a rank saves other parts of the state with each.
    """

    def prepare(self) -> None:
        """Train with each optimizer, undisturbed."""
        self.pairs: Counter[str] = Counter()
        for index, choice in enumerate(CHOICES):
            assert run_forked(request(self._whole(choice), choice)).code == 0
            if index:
                assert learned(self._whole(choice)) == learned(self._whole(next(iter(CHOICES)))), choice

    def attempts(self, folder: Path, draw: random.Random) -> Attempts:
        """With two of :data:`CHOICES` that differ."""
        first, second = draw.sample([*CHOICES], 2)
        self.pairs[f"{first} -> {second}"] += 1
        return Attempts(request(folder, first), request(folder, second), self._whole(second))

    def _whole(self, choice: str) -> Path:
        return self._folder / f"whole-{[*CHOICES].index(choice)}"


def kills_between(folder: Path, count: int, seed: int, jobs: int) -> Figures:
    """So many kills, each gone on with from another optimizer."""
    trials = KillsBetween(folder)
    what = "a rank killed at random, and another optimizer after it: no commit lost, bit for bit"
    figures = campaign(what, trials.trial, range(seed, seed + count), jobs)
    figures.notes += [f"{len(trials.pairs)} of {len(CHOICES) * (len(CHOICES) - 1)} pairs of optimizers"]
    figures.notes += [", ".join(f"{phase} {struck}" for phase, struck in sorted(trials.struck.items()))]
    return figures
