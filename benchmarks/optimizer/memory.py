"""Peak memory of a rank with what shards parameters: how far a process grows from before the model to the last step."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.optimizer import ours
from benchmarks.optimizer.model import SHAPES, Batch, Side
from benchmarks.optimizer.peers import deepspeed
from benchmarks.optimizer.peers.torch import FsdpSide
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from benchmarks.support.shape import Shape

Make = Callable[[ours.Ranks, Shape, Batch], Side]
RANKS, STEPS = 2, 3
_PROCESS = Path("/proc/self")


def _deepspeed(ranks: ours.Ranks, shape: Shape, batch: Batch) -> Side:
    return deepspeed.DeepSpeedSide(ranks, shape, batch, stage=3)


def _fsdp(ranks: ours.Ranks, shape: Shape, batch: Batch) -> Side:
    return FsdpSide(ranks, shape, batch, resharding=True)


SIDES: Mapping[str, Make] = {
    "zero1": ours.sharded,
    "zero3": ours.lent,
    "FSDP2": _fsdp,
    "DeepSpeed ZeRO-3": _deepspeed,
}


def peak(side: str, shape: str) -> float:
    """MiB by which this rank grows while it builds the model of ``shape`` and trains some steps."""
    ranks, batch = ours.Ranks(), Batch(SHAPES[shape])
    SIDES[side](ranks, SHAPES["tiny"], Batch(SHAPES["tiny"])).step()  # libraries that a first step loads
    gc.collect()
    (_PROCESS / "clear_refs").write_text("5", "ascii")  # the peak so far is forgotten
    before = _mebibytes("VmRSS")
    made = SIDES[side](ranks, SHAPES[shape], batch)
    for _ in range(STEPS):
        made.step()
    return _mebibytes("VmHWM") - before


def _mebibytes(name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (_PROCESS / "status").read_text("ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def memory_table(shape: str) -> Iterator[str]:
    """A row a side, each in processes of its own."""
    rows = []
    for side in SIDES:
        if side.startswith("DeepSpeed") and not deepspeed.installed():
            continue
        rows.append((side, f"{on_ranks(peak, RANKS, {'side': side, 'shape': shape}):.0f}"))
    yield from table(("optimizer", "peak of a rank, MiB"), rows)
