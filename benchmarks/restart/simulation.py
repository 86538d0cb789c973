"""The effective time of runs on up to 16,384 ranks, with a failure every 3 hours, from what was measured and assumed.

What grows with the ranks is measured here as a function of their number, in one process: notes of all ranks at the
store, the choice from what all hosts hold, and the manifest, which every rank reads. What this machine cannot tell
(processes on a cluster, NCCL's communicators, the rate of a network) is taken from published figures.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import TCPStore

from benchmarks.support.report import table
from megatron_run_engine.checkpoint.manifest import About, DataRecord, Manifest, decode_manifest, make_manifest
from megatron_run_engine.checkpoint.memory_home import Held
from megatron_run_engine.checkpoint.survivors import choose

RANKS = (8, 512, 2048, 16384)
FEW = (8, 512)
#: Ranks of a host, seconds between failures, days that are simulated.
HOST, BETWEEN, DAYS = 8, 3 * 3600.0, 60
#: A step, and the steps between two copies in memory.
STEP, EVERY = 10.0, 5
GOAL = 0.97


class Costs(NamedTuple):
    """Seconds of each phase of a restart on so many ranks."""

    detection: float
    ranks_gone: float
    processes: float
    join: float
    communicators: float
    build: float
    choice: float
    fetch: float
    first_step: float

    @property
    def whole(self) -> float:
        """From the failure to the first new step's begin."""
        return sum(self)


#: Assumed: a host that is gone is seen by its agent's heartbeat; processes start and import on their hosts in parallel;
#: model and data are built as slowly as large ones are; the cost of a first step is that of any.
ASSUMED: Mapping[str, float] = {
    "detection": 10.0,
    "ranks_gone": 4.0,
    "processes": 20.0,
    "build": 10.0,
    "first_step": 0.0,
}
#: Seconds until NCCL's communicators are made: MegaScale (NSDI 2024, section 3.5) has less than 5 s on 2,048 GPUs, and
#: less than 30 s on 10,000; taken as linear.
COMMUNICATORS = ((2048, 5.0), (10000, 30.0))
#: The state of a lost host, 12 bytes for each of 1/16384 of a trillion parameters on each rank, over one link of
#: 200 Gb/s at half its rate.
FETCH = 12 * 1e12 / 16384 * HOST / (200e9 / 8 / 2)


def simulation(*, quick: bool) -> Iterator[str]:
    """Measure what grows, then draw failures."""
    sizes = FEW if quick else RANKS
    costs = {ranks: costs_on(ranks) for ranks in sizes}
    yield f"\nA step of {STEP:g} s, a copy in memory every {EVERY} steps, a failure every {BETWEEN / 3600:g} h.\n"
    names = {
        "join": "join: notes at a store",
        "choice": "choice, manifest",
        "communicators": "communicators (published)",
    }
    rows = [
        (names.get(name, name.replace("_", " ")), *(f"{getattr(costs[each], name):.2f}" for each in sizes))
        for name in Costs._fields
    ]
    rows.append(("failure to first new step", *(f"{costs[each].whole:.1f}" for each in sizes)))
    shares = {ranks: share(costs[ranks].whole, random.Random(ranks)) for ranks in sizes}
    rows.append(("effective time, %", *(f"{100 * shares[each]:.2f}" for each in sizes)))
    rows.append((f"goal: at least {GOAL:.0%}", *("yes" if shares[each] >= GOAL else "no" for each in sizes)))
    yield from table(("seconds, by ranks", *(f"{each:,}" for each in sizes)), rows)
    most = (1 - GOAL) * BETWEEN - EVERY * STEP
    yield f"\nThe goal leaves {most:.0f} s for a restart, beside {EVERY} steps that are done anew."


def share(down: float, draw: random.Random) -> float:
    """The share of ``DAYS`` that ended in steps which stayed; each failure costs ``down``, and what was not copied.

    Failures come at random, also within a restart, which then begins again.
    """
    now, end, kept, saved = 0.0, DAYS * 86400.0, 0.0, 0.0
    while now < end:
        left = draw.expovariate(1 / BETWEEN)
        if left <= down:
            now += left
            continue
        work = left - down
        saved = max(0.0, (work // (EVERY * STEP) - 1) * EVERY * STEP)  # the newest copy may be under way
        kept += saved
        now += left
    return kept / now


def costs_on(ranks: int) -> Costs:
    """What a restart costs on so many ranks."""
    join = _seconds(lambda: notes_at_a_store(ranks))
    manifest = manifest_of(ranks).encode()
    hosts = max(1, ranks // HOST)
    per = [f"rank-{rank:05d}.safetensors" for rank in range(ranks)]
    held = [
        [Held(5, "x", len(manifest), ranks, (*per[HOST * h : HOST * h + HOST], *per[HOST * h - HOST : HOST * h]))]
        for h in range(hosts)
    ]
    text = [json.dumps(each) for each in held]
    choice = _seconds(lambda: choose([[Held(*part) for part in json.loads(each)] for each in text], 1))
    choice += _seconds(lambda: decode_manifest(manifest, "manifest"))
    return Costs(join=join, choice=choice, communicators=communicators_on(ranks), fetch=FETCH, **ASSUMED)


def communicators_on(ranks: int) -> float:
    """Seconds until so many ranks have their communicators, on the line through what is published."""
    (low, first), (high, second) = COMMUNICATORS
    return first * ranks / low if ranks <= low else first + (second - first) / (high - low) * (ranks - low)


def notes_at_a_store(ranks: int) -> None:
    """A phase of a rendezvous at its store: all ranks write a note, rank 0 reads all, and all read a verdict."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    keys = [f"phase/{rank}" for rank in range(ranks)]
    for key in keys:
        store.set(key, json.dumps({"failure": None}))
    store.multi_get(keys)
    store.set("verdict", "{}")
    for _ in keys:
        store.get("verdict")


def manifest_of(ranks: int) -> Manifest:
    """A step of as many files, each with the parts of four tensors that are split over all ranks, in two fields."""
    about = About(
        step=5, run="0" * 32, time="", counters={}, scaler={}, data=DataRecord(samples=1, sha256="0" * 64), plugins={},
        versions={}, topology={}, config="0" * 64, identity={},
    )  # fmt: skip
    files = {
        f"rank-{rank:05d}.safetensors": {"bytes": 10**9, "sha256": "0" * 64, "xxh3": "0" * 32} for rank in range(ranks)
    }
    pieces = [(name, (rank, 0), (1, 64)) for rank, name in enumerate(files)]
    field = {"dtype": "F32", "shape": (ranks, 64), "pieces": pieces}
    tensors = {f"layers.{number}.weight": {"master": field, "exp_avg": field} for number in range(4)}
    return make_manifest(about, files, tensors)


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
