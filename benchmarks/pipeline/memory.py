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


def measure_memory(shape: str, schedule: str, peer: str | None, steps: int, keep_outputs: bool = False) -> int:
    """Peak resident bytes of the rank with the loss over ``steps`` steps: of ``peer``, or else of ``schedule``."""
    sides, split = Sides(SHAPES[shape]), SCHEDULES[schedule].split
    side = sides.peer(peer, split, keep_outputs=keep_outputs) if peer else sides.own(schedule)
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
    for schedule, peer in COMPARED:
        job = {"shape": "small", "schedule": schedule, "steps": 1 if quick else 3}
        own = on_ranks(measure_memory, 2, {**job, "peer": None})
        for keep_outputs, kept in ((True, "all, its default"), (False, "none, on request")):
            peak = on_ranks(measure_memory, 2, {**job, "peer": peer, "keep_outputs": keep_outputs})
            yield schedule, peer, kept, f"{own / 1e6:.0f}", f"{peak / 1e6:.0f}", f"{own / peak:.2f}"
