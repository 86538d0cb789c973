"""Timed calls, and how much of the machine something else used meanwhile: reason to drop a sample."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_TICKS = os.sysconf("SC_CLK_TCK")
#: The share of the cores that something else may use during a sample.
FOREIGN = 0.05
#: With fewer undisturbed samples than this the least disturbed half is used, and the table says so.
ENOUGH = 3


def busy_seconds(stat: str) -> float:
    """Processor seconds, of all cores, that the first line of ``/proc/stat`` counts as not idle, stolen ones too."""
    user, nice, system, idle, io, irq, soft, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    del idle, io  # nobody used these
    return (user + nice + system + irq + soft + steal) / _TICKS


@dataclass(frozen=True)
class Sample:
    """One timed call on every rank.

    ``seconds`` of the slowest rank, ``processor`` seconds of all ranks together, and the share of the cores that was
    ``foreign``: used by something else.
    """

    seconds: float
    processor: float
    foreign: float


def take_sample(call: Callable[[], object]) -> Sample:
    """Run ``call`` on all ranks at once, from one barrier on."""
    stat = Path("/proc/stat")
    dist.barrier()
    busy, used, start = busy_seconds(stat.read_text("ascii")), time.process_time(), time.perf_counter()
    call()
    wall, used = time.perf_counter() - start, time.process_time() - used
    dist.barrier()
    everything = time.perf_counter() - start
    busy = busy_seconds(stat.read_text("ascii")) - busy
    total, slowest = torch.tensor([used], dtype=torch.float64), torch.tensor([wall, busy, everything])
    dist.all_reduce(total)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    wall, busy, everything = slowest.tolist()
    foreign = max(0.0, busy - total.item()) / (everything * (os.cpu_count() or 1))
    return Sample(wall, total.item(), foreign)


def timed(name: str, call: Callable[[], object]) -> dict[str, float]:
    """One timed call, as part of a round: ``<name> seconds``, ``<name> processor`` and ``<name> foreign``."""
    return {f"{name} {key}": value for key, value in asdict(take_sample(call)).items()}


@dataclass(frozen=True)
class Kept:
    """The samples that count, out of ``taken``; ``quiet`` says whether they can be taken at their word."""

    samples: Sequence[Mapping[str, float]]
    taken: int
    quiet: bool

    def __str__(self) -> str:
        return f"{len(self.samples)} of {self.taken}" + ("" if self.quiet else ", disturbed")


def undisturbed(samples: Sequence[Mapping[str, float]]) -> Kept:
    """The samples during which the machine was ours; where there are too few, the least disturbed half stands in.

    Every key of a sample that ends in ``foreign`` is a share of the cores that something else used.
    """

    def disturbance(sample: Mapping[str, float]) -> float:
        return max(value for key, value in sample.items() if key.endswith("foreign"))

    quiet = [sample for sample in samples if disturbance(sample) <= FOREIGN]
    if len(quiet) >= ENOUGH:
        return Kept(quiet, len(samples), True)
    return Kept(sorted(samples, key=disturbance)[: max(1, len(samples) // 2)], len(samples), False)


def kept_of(samples: Sequence[Mapping[str, float]], *names: str) -> Kept:
    """The rounds in which none of ``names`` was disturbed.

    Samples name what they hold ``<name> seconds`` and ``<name> foreign``; what others hold is left out.
    """
    starts = tuple(f"{name} " for name in names)
    return undisturbed([{key: value for key, value in sample.items() if key.startswith(starts)} for sample in samples])


def ratio(samples: Sequence[Mapping[str, float]], one: str, other: str, what: str = "seconds") -> tuple[Kept, float]:
    """The rounds in which neither side was disturbed, and the median over them of ``one``'s ``what`` by ``other``'s."""
    kept = kept_of(samples, one, other)
    return kept, statistics.median(sample[f"{one} {what}"] / sample[f"{other} {what}"] for sample in kept.samples)
