"""Step time and memory of one schedule of ours against one of ``torch.distributed.pipelining``, on the same chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pipeline_megatron import NAME as MEGATRON
from benchmarks.pipeline_megatron import MegatronStep, installed
from benchmarks.pipeline_quiet import take_sample
from benchmarks.pipeline_small import HALF, SCHEDULES, SMALL, STAGES, TINY, OurStep, Shape, Stage, make_plan
from benchmarks.pipeline_torch import TorchStep
from megatron_run.comm import create_groups
from megatron_run.topology import Sizes, Topology

SHAPES = {"small": SMALL, "half": HALF, "tiny": TINY}
#: Steps whose time is discarded.
WARM_UP = 2
#: How far the two sides' gradients may lie apart, relative to the largest value of each tensor.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Pair:
    """A schedule of ours and a peer's. ``split``: the schedule of ours whose split of the layers theirs uses."""

    ours: str
    theirs: str
    split: str


PAIRS = (
    Pair("gpipe", "ScheduleGPipe", "gpipe"),
    Pair("1f1b", "Schedule1F1B", "1f1b"),
    Pair("interleaved", "ScheduleInterleaved1F1B", "interleaved"),
    Pair("zb-h1", "ScheduleInterleavedZeroBubble", "interleaved"),
    Pair("zb-v", "ScheduleInterleavedZeroBubble", "interleaved"),
    Pair("zb-v", "ScheduleZBVZeroBubble", "zb-v"),
    *([Pair("1f1b", MEGATRON, "1f1b")] if installed() else []),
)


@dataclass(frozen=True)
class Side:
    """One side of a comparison: ``step`` accumulates into the gradients of ``stage``."""

    stage: Stage
    step: Callable[[], None]

    def results(self) -> dict[str, Tensor]:
        """Losses and gradients of one step, of all ranks, by name."""
        self.stage.clear()
        self.step()
        gathered: list[dict[str, Tensor] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.stage.results())
        return {name: tensor for one in gathered if one for name, tensor in one.items()}


class Sides:
    """Makes sides; those with the same split of the layers share their stage."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self._rank = shape, dist.get_rank()
        self._groups = create_groups(Topology(Sizes(pipeline=STAGES), self._rank), dist.default_pg_timeout)
        self._stages: dict[tuple[Any, ...], Stage] = {}

    def ours(self, name: str) -> Side:
        """Schedule ``name`` of this project. Its stage follows the plan, and only its chunks may be shared."""
        stage = self._stage(name)
        return Side(stage, OurStep(stage, make_plan(SCHEDULES[name], self._shape.microbatches), self._groups))

    def theirs(self, name: str, split: str, *, keep_outputs: bool = False) -> Side:
        """Schedule ``name`` of a peer, with the layers split as for ``split``."""
        stage = self._stage(split)
        if name == MEGATRON:
            return Side(stage, MegatronStep(stage))
        return Side(stage, TorchStep(stage, name, keep_outputs=keep_outputs))

    def _stage(self, name: str) -> Stage:
        layout = make_plan(SCHEDULES[name], self._shape.microbatches).layout
        if layout not in self._stages:
            self._stages[layout] = Stage(layout, self._rank, self._shape)
        return self._stages[layout]


def measure_pairs(shape: str, samples: int, only: Sequence[int] = range(len(PAIRS))) -> list[dict[str, Any]]:
    """Per pair: the seconds of ``samples`` steps of each side, in turns, and how much else ran meanwhile."""
    sides, found = Sides(SHAPES[shape]), []
    for pair in (PAIRS[index] for index in only):
        ours, theirs = sides.ours(pair.ours), sides.theirs(pair.theirs, pair.split)
        apart = difference(ours.results(), theirs.results())
        if apart > TOLERANCE:
            raise ValueError(f"{pair}: the gradients differ by {apart:.1e} of their largest value")
        taken: list[dict[str, Any]] = []
        for index in range(WARM_UP + samples):
            both: dict[str, float] = {}
            for name, side in (("ours", ours), ("theirs", theirs)):
                side.stage.clear()
                sample = take_sample(side.step)
                both |= {f"{name}_{key}": value for key, value in asdict(sample).items()}
            if index >= WARM_UP:
                taken.append(both)
        found.append({"ours": pair.ours, "theirs": pair.theirs, "apart": apart, "samples": taken})
    return found


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """How far the tensors of two sides lie apart at most, each relative to its largest value."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"the two sides do not hold the same tensors: {sorted(ours.keys() ^ theirs.keys())}")
    return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in ours)


def measure_memory(shape: str, side: str, schedule: str, split: str, steps: int) -> dict[str, int]:
    """Peak resident bytes of the last rank over ``steps`` steps of one side, and what it held before them.

    ``side`` is ``ours``, ``theirs``, or ``theirs, keeping outputs``.
    """
    sides = Sides(SHAPES[shape])
    made = sides.ours(schedule) if side == "ours" else sides.theirs(schedule, split, keep_outputs="keep" in side)
    before = status_bytes("VmRSS")
    for _ in range(steps):
        made.stage.clear()
        made.step()
    numbers = torch.tensor([before, status_bytes("VmHWM")])
    dist.broadcast(numbers, STAGES - 1)
    return dict(zip(("before", "peak"), map(int, numbers.tolist()), strict=True))


def status_bytes(key: str) -> int:
    """A number of this process's memory, as Linux counts it: VmRSS now, VmHWM at most so far."""
    line = next(line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
