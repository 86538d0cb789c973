"""Peak resident memory of the rank that has the loss, each side in processes of its own.

By default torch returns the outputs of a step, so it keeps the logits of every microbatch. It can be told not to, by
those who need no outputs; this project never keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.pipeline.model import SHAPES
from benchmarks.pipeline.schedules import SCHEDULES
from benchmarks.pipeline.sides import Sides, loss_stage
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table

#: Schedules of ours and of torch's, both on the split of ours.
COMPARED = (
    ("gpipe", "ScheduleGPipe"),
    ("1f1b", "Schedule1F1B"),
    ("interleaved", "ScheduleInterleaved1F1B"),
    ("zb-v", "ScheduleZBVZeroBubble"),
)


def measure_memory(shape: str, ours: str, theirs: str | None, steps: int, keep_outputs: bool = False) -> int:
    """Peak resident bytes of the rank with the loss over ``steps`` steps: of ``theirs``, or without it of ``ours``."""
    sides, split = Sides(SHAPES[shape]), SCHEDULES[ours].split
    side = sides.theirs(theirs, split, keep_outputs=keep_outputs) if theirs else sides.ours(ours)
    for _ in range(steps):
        side.stage.clear()
        side.step()
    peak = torch.tensor(peak_bytes())
    dist.broadcast(peak, loss_stage(split))
    return int(peak)


def peak_bytes() -> int:
    """The most memory that this process has had resident so far, as Linux counts it."""
    status = Path("/proc/self/status").read_text("ascii").splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024


def report(*, quick: bool) -> Iterator[str]:
    """Measure every schedule, and tell what was found."""
    yield "\n## Peak memory of the rank with the loss\n"
    yield from table(("ours", "theirs", "logits that theirs keeps", "ours, MB", "theirs, MB", "ratio"), rows(quick))


def rows(quick: bool) -> Iterator[tuple[str, ...]]:
    """Two a schedule: against the peer's default first, then against its most frugal setting."""
    for ours, theirs in COMPARED:
        job = {"shape": "small", "ours": ours, "steps": 1 if quick else 3}
        mine = on_ranks(measure_memory, 2, {**job, "theirs": None})
        for keep_outputs, kept in ((True, "all, its default"), (False, "none, on request")):
            peak = on_ranks(measure_memory, 2, {**job, "theirs": theirs, "keep_outputs": keep_outputs})
            yield ours, theirs, kept, f"{mine / 1e6:.0f}", f"{peak / 1e6:.0f}", f"{mine / peak:.2f}"
