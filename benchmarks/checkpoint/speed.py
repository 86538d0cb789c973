"""How fast a state is saved and loaded by every side: the same tensors, in turns, in one process group.

What every side loads is compared with what it saved before anything is timed. A file that was just written is still in
the machine's memory: loading from there is timed, and again when that memory was given back, where the disk decides.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.ours import OurSide
from benchmarks.checkpoint.peers.torch import DistributedCheckpoint, TorchSave
from benchmarks.checkpoint.state import Side, State
from benchmarks.optimizer.model import SHAPES
from benchmarks.support.quiet import kept_of, ratio, timed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table

OURS, DCP, SYNCED, UNSYNCED = "ours", "torch.distributed.checkpoint", "torch.save, synced", "torch.save"
#: What is timed of each side. A peer that returns before its bytes are on the disk is shown, and is no goal.
CALLS = ("save", "load", "load cold")
PEERS = (DCP, SYNCED)
#: Ours against the best of the peers, in bytes a second.
GOAL = 1.0
#: Of the state: 55 million parameters, with two moments each.
SHAPE = "wide"
#: Ranks, and threads of each.
RANKS = ((1, 2), (2, 1))
MEMORY = Path("/dev/shm")


def measure(folder: str, shape: str, samples: int) -> dict[str, Any]:
    """The bytes of a rank, and ``samples`` rounds of every call of every side."""
    state = State(shape)
    place = Path(folder)
    sides: dict[str, Side] = {
        OURS: OurSide(state, place / "ours"),
        DCP: DistributedCheckpoint(state, place / "dcp"),
        SYNCED: TorchSave(state, place / "synced", synced=True),
        UNSYNCED: TorchSave(state, place / "unsynced", synced=False),
    }
    for side in sides.values():
        side.save(0)
        state.forget()
        side.load(0)
        state.check()
        side.drop(0)
    rounds = [_in_turn(sides, number, place) for number in range(1, samples + 1)]
    return {"bytes": state.bytes, "samples": rounds}


def _in_turn(sides: Mapping[str, Side], number: int, place: Path) -> dict[str, float]:
    """One timed call of each: ``<side> <call> seconds`` and so on."""
    found: dict[str, float] = {}
    for name, side in sides.items():
        for call in CALLS:
            work: Callable[[int], None] = side.save if call == "save" else side.load
            if call == "load cold":
                forget_files(place)
            found |= timed(f"{name}, {call}", partial(work, number))
        side.drop(number)
    return found


def forget_files(place: Path) -> None:
    """Give back the memory in which the machine keeps what was written to the files under ``place``."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def on_the_disk(*, quick: bool) -> Iterator[str]:
    """On the disk of the temporary folder."""
    return report("On the disk", None, quick=quick)


def in_memory(*, quick: bool) -> Iterator[str]:
    """On a file system in memory: what is left is the work of the processor."""
    if MEMORY.is_dir():
        yield from report("In memory", MEMORY, quick=quick)


def report(title: str, place: Path | None, *, quick: bool) -> Iterator[str]:
    """Measure every side on every number of ranks, with files under ``place``."""
    yield f"\n## {title}\n"
    yield f"The masters and moments of {SHAPES[SHAPE]}, split over the ranks as zero1 does."
    for ranks, threads in RANKS:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            arguments = {"folder": folder, "shape": SHAPE, "samples": 3 if quick else 9}
            found = on_ranks(measure, ranks, arguments, threads=threads, keeping=True)
        total = ranks * found["bytes"]
        yield f"\n### {ranks} rank{'s' * (ranks > 1)} of {total / ranks / 1e6:.0f} MB\n"
        yield from speed_table(found["samples"], total)
        yield ""
        yield from goal_table(found["samples"])


def speed_table(samples: Sequence[Mapping[str, float]], size: int) -> Iterator[str]:
    """A row a side: the GB that it saves and loads in a second, all ranks together."""
    columns = ("side", *(f"{call}, GB/s" for call in CALLS), "samples used")
    yield from table(columns, (_speed_row(samples, size, name) for name in (OURS, *PEERS, UNSYNCED)))


def _speed_row(samples: Sequence[Mapping[str, float]], size: int, name: str) -> tuple[str, ...]:
    kept = {call: kept_of(samples, f"{name}, {call}") for call in CALLS}
    rates = [
        size / 1e9 / statistics.median(sample[f"{name}, {call} seconds"] for sample in kept[call].samples)
        for call in CALLS
    ]
    return name, *(f"{rate:.2f}" for rate in rates), "; ".join(map(str, kept.values()))


def goal_table(samples: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """A row a call: how much faster ours is than each peer that leaves its bytes on the disk."""
    columns = ("ours against", *CALLS, "goal", "met")
    yield from table(columns, (_goal_row(samples, peer) for peer in PEERS))


def _goal_row(samples: Sequence[Mapping[str, float]], peer: str) -> tuple[str, ...]:
    faster = [ratio(samples, f"{peer}, {call}", f"{OURS}, {call}")[1] for call in CALLS]
    met = "yes" if min(faster) >= GOAL else "no"
    return peer, *(f"{each:.2f}" for each in faster), f"at least {GOAL:.2f}", met
