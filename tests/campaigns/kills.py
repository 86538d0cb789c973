"""Ranks killed at random: nothing that was committed is lost, and each run goes on bit for bit."""

from __future__ import annotations

import random
import shutil
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_run.config.request import Request
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.campaigns.figures import Figures, campaign
from tests.support.forked import learned, run_forked, saved_bits, tiny

LAST = 5
WORLD = 4
#: Two stages of two data-parallel ranks.
SETS: Mapping[str, Any] = {"train.steps": LAST, "parallel.pipeline": 2}
PLUGINS = ("schedule=1f1b", "optimizer=zero1")
#: Phases in which any rank, or the first alone, can die.
ANYWHERE = (
    "data", "forward", "backward", "send", "receive", "gradient-reduce", "optimizer", "parameter-gather", "collective",
    "save", "save-shard",
)  # fmt: skip
ON_THE_FIRST = ("save-manifest", "save-rename", "save-latest", "save-retention")


def request(folder: Path) -> Request:
    """Four ranks, every step saved."""
    return tiny(folder, SETS, PLUGINS, nproc=WORLD)


def drawn_fault(draw: random.Random) -> str:
    """A kill of some rank in some step but the last, at some entrance of some phase, or within 10 ms after."""
    rank, phase = draw.randrange(WORLD), draw.choice(ANYWHERE + ON_THE_FIRST)
    rank = 0 if phase in ON_THE_FIRST else rank
    nth = draw.choice((1, 1, 2)) if phase in ANYWHERE else 1
    after = f",after={draw.uniform(0.0001, 0.01):.4f}" if draw.random() < 0.5 else ""
    return f"rank={rank},step={draw.randint(1, LAST - 1)},at={phase},nth={nth},kind=kill{after}"


class Attempts(NamedTuple):
    """What is killed, what goes on in the same folder, and where a run ended that nothing disturbed."""

    killed: Request
    goes_on: Request
    whole: Path


class Kills:
    """Trials against one run that nothing disturbed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.struck: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.alone: list[float] = []
        self.prepare()

    def prepare(self) -> None:
        """Train what nothing disturbs."""
        assert run_forked(request(self._folder / "whole")).code == 0

    def attempts(self, folder: Path, draw: random.Random) -> Attempts:
        """Those of a trial in ``folder``."""
        return Attempts(request(folder), request(folder), self._folder / "whole")

    def trial(self, seed: int) -> Sequence[str]:
        """Kill a rank, look at what is saved, go on; what was not as promised. A fault that did not come is redrawn."""
        draw = random.Random(seed)
        while True:
            folder = self._folder / f"run-{seed}"
            fault = drawn_fault(draw)
            attempts = self.attempts(folder, draw)
            died = run_forked(attempts.killed, fault)
            if died.code:
                break
            shutil.rmtree(folder)
        self.struck[fault.partition("at=")[2].partition(",")[0]] += 1
        self.seconds.append(died.seconds)
        rank = int(fault.partition("rank=")[2].partition(",")[0])
        log = folder / "logs" / "attempt-001" / f"rank-{rank:05d}.log"  # its last word is what befell it
        self.alone.append(died.ended - log.stat().st_mtime)
        faults = [] if died.code == 4 and "was killed by SIGKILL" in died.message else [f"{died.code} {died.message}"]
        faults += lost(folder) + continued(folder, attempts)
        shutil.rmtree(folder)
        return [f"seed {seed}, {fault}: {each}" for each in faults]


def continued(folder: Path, attempts: Attempts) -> list[str]:
    """What differs once the run in ``folder`` has gone on to its end."""
    ended = run_forked(attempts.goes_on)
    if ended.code:
        return [f"it did not go on: {ended.message}"]
    same = saved_bits(folder, LAST) == saved_bits(attempts.whole, LAST) and learned(folder) == learned(attempts.whole)
    return [] if same else ["it went on to other numbers"]


def lost(folder: Path) -> list[str]:
    """Commits that are gone: after step n was done, the save of step n - 1 had returned."""
    checkpoints = Checkpoints(folder / "checkpoints")
    done = max(learned(folder), default=0)
    try:
        newest = checkpoints.newest() or 0
        for step in checkpoints.steps():
            checkpoints.verify(step)
    except CheckpointError as error:
        return [str(error)]
    return [] if newest >= done - 1 else [f"step {done} was done, and the newest saved is {newest}"]


def kills(folder: Path, count: int, seed: int, jobs: int) -> Figures:
    """So many kills, each with its continuation."""
    trials = Kills(folder)
    figures = campaign(
        "a rank killed at random: no commit lost, the run goes on bit for bit",
        trials.trial,
        range(seed, seed + count),
        jobs,
    )
    figures.notes += [
        f"median {statistics.median(trials.seconds):.2f} s from the start of a run of {WORLD} ranks to its end",
        f"at most {max(trials.alone):.1f} s from the kill until the run has ended",
        ", ".join(f"{phase} {struck}" for phase, struck in sorted(trials.struck.items())),
    ]
    return figures
