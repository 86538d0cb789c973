"""Ranks that hang, are stopped, are slow, or hold other weights: each is named, and none that is only slow."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

from tests.campaigns.figures import Figures, campaign
from tests.support.forked import learned, run_forked, tiny

LIMIT = 1.5
#: Phases in which a rank does something by itself, and those in which it meets others: who hangs in the midst of those
#: looks from outside like whom he meets, but a process that is stopped can be told.
ALONE = ("data", "forward", "backward", "gradient-reduce", "optimizer", "parameter-gather")
TOGETHER = ("send", "receive", "collective")
STEPS_AT_ONCE = 125


def hangs(folder: Path, count: int, seed: int, jobs: int) -> Figures:
    """One rank of four hangs, or is stopped, somewhere: it is named with its phase within the limit and two seconds."""
    late: list[float] = []

    def trial(each: int) -> Sequence[str]:
        draw = random.Random(each)
        rank, kind = draw.randrange(4), draw.choice(("hang", "stop"))
        phase = draw.choice(ALONE + TOGETHER * (kind == "stop"))
        step, run = draw.randint(1, 3), folder / str(each)
        sets = {"parallel.pipeline": 2, "run.timeout": LIMIT, "train.steps": 4, "checkpoint.interval": 0}
        request = tiny(run, sets, ("schedule=1f1b", "optimizer=zero1"), nproc=4)
        hung = run_forked(request, f"rank={rank},step={step},at={phase},kind={kind}")
        log = run / "logs" / "attempt-001" / f"rank-{rank:05d}.log"  # its last word is what befell it
        late.append(hung.ended - log.stat().st_mtime - LIMIT)
        word = "hangs" if kind == "hang" else r"is stopped by a signal \(SIGSTOP\)"
        where = "a collective|all-|sum of|gather of|broadcast|reduce" if phase == "collective" else phase
        named = re.match(rf"rank {rank} {word}: .* in ({where}).* of step {step}", hung.message)
        return [] if hung.code == 4 and named else [f"seed {each}: {rank} {phase} {kind}: {hung.code} {hung.message}"]

    figures = campaign("a rank that hangs or is stopped: named with its phase", trial, range(seed, seed + count), jobs)
    figures.notes.append(f"at most {max(late):.1f} s after the limit of {LIMIT:g} s")
    return figures


def slow_steps(folder: Path, count: int, seed: int) -> Figures:
    """Steps in which some rank takes most of the limit for one phase: no alarm."""
    runs = max(1, count // STEPS_AT_ONCE)
    steps = min(count, STEPS_AT_ONCE)

    def trial(each: int) -> Sequence[str]:
        draw = random.Random(each)
        sets = {"run.timeout": 1.0, "train.steps": steps, "checkpoint.interval": 0, "guard.straggler_interval": 0}
        fault = f"rank={draw.randrange(2)},at=parameter-gather,kind=slow,seconds={draw.uniform(0.3, 0.6):.2f}"
        run = folder / str(each)
        ended = run_forked(tiny(run, sets, nproc=2), fault, timeout=20.0 + 2 * steps)
        well = ended.code == 0 and len(learned(run)) == steps
        return [] if well else [f"seed {each}, {fault}: {ended.code} {ended.message}"]

    figures = campaign("runs of slow steps: no alarm", trial, range(seed, seed + runs), runs)
    figures.notes.append(f"{runs * steps} steps, in each a phase of 0.3 to 0.6 of the limit")
    return figures


def flipped_replicas(folder: Path, count: int, seed: int, jobs: int) -> Figures:
    """One bit of the weights of one replica of four flips after some step: the rank is named, exit code 6."""

    def trial(each: int) -> Sequence[str]:
        draw = random.Random(each)
        rank, step = draw.randrange(4), draw.randint(1, 3)
        sets = {"guard.replica_interval": 1, "checkpoint.interval": 0}
        found = run_forked(tiny(folder / str(each), sets, nproc=4), f"rank={rank},step={step},at=observe,kind=flip")
        named = found.message.startswith(f"after step {step} rank {rank} holds another ")
        return [] if found.code == 6 and named else [f"seed {each}: {rank} {step}: {found.code} {found.message}"]

    return campaign("a bit flipped in one of four replicas: the rank is named", trial, range(seed, seed + count), jobs)
