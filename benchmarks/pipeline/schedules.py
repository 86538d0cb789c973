"""This project's schedules as the benchmark runs them: a verified plan, and a step of it by the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_run.contracts import Boundary, Chunk, Microbatch, Schedule
from megatron_run.contracts.schedule import LayoutSpec, ScheduleSpec
from megatron_run.pipeline.lower import lower
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from megatron_run_engine.runtime.comm import Channels
from megatron_run_engine.runtime.execute import Executor, StepInputs
from megatron_run_engine.runtime.gradients import GradientAccumulator
from megatron_run_engine.runtime.messages import Messenger
from megatron_run_engine.training.build import LOOKAHEAD
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_gpipe import GPipe
from megatron_run_schedule_interleaved import Interleaved
from megatron_run_schedule_zero_bubble import ZeroBubbleH1, ZeroBubbleV

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LayerCounts:
    """How two stages divide the layers: ``counts`` are those of each place in model order.

    The head weighs about as much as two layers. In all three, the stage without it computes four layers and the stage
    with it two, so the stages have about the same work.
    """

    name: str
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {', '.join(map(str, self.counts))}"


#: One chunk a stage; a loop over the stages and again; down the stages and back up.
BLOCKS, LOOP, FOLD = LayerCounts("blocks", (4, 2)), LayerCounts("loop", (2, 1, 2, 1)), LayerCounts("V", (1, 2, 2, 1))


@dataclass(frozen=True)
class OwnSchedule:
    """A schedule of this project, its chunks a stage, and the split of the layers that it is compared on."""

    make: Callable[[], Schedule]
    chunks: int
    split: LayerCounts


SCHEDULES: Mapping[str, OwnSchedule] = {
    "gpipe": OwnSchedule(GPipe, 1, BLOCKS),
    "1f1b": OwnSchedule(OneForwardOneBackward, 1, BLOCKS),
    "interleaved": OwnSchedule(Interleaved, 2, LOOP),
    "zb-h1": OwnSchedule(ZeroBubbleH1, 1, BLOCKS),
    "zb-v": OwnSchedule(ZeroBubbleV, 2, FOLD),
}


def make_plan(name: str, stages: int, microbatches: int, counts: tuple[int, ...] = ()) -> Plan:
    """The verified plan of schedule ``name``, with ``counts`` layers at each place: by default one."""
    entry = SCHEDULES[name]
    schedule, counts = entry.make(), counts or (1,) * (stages * entry.chunks)
    layout = schedule.layout(LayoutSpec(stages, entry.chunks, sum(counts), counts))
    spec = ScheduleSpec(layout, stages, entry.chunks, microbatches)
    return verify(spec, schedule.actions(spec))


def _empty(index: int) -> Microbatch:
    return Microbatch(index, 1, index, {})


def _ignore(_: int, __: str, ___: Tensor, ____: Tensor) -> None:
    """Report no loss."""


def _weight(_: str, weight: Tensor) -> Tensor:
    return weight


def step_inputs(
    boundary: Boundary,
    microbatch: Callable[[int], Microbatch] = _empty,
    report: Callable[[int, str, Tensor, Tensor], None] = _ignore,
    seed: Callable[[str, Tensor], Tensor] = _weight,
) -> StepInputs:
    """The executor's requests, by default of chunks that need no data."""
    return StepInputs(microbatch=microbatch, boundary=lambda _: boundary, report=report, seed=seed)


def executed(
    plan: Plan,
    stage: int,
    chunks: Sequence[Chunk],
    gradients: GradientAccumulator,
    channels: Channels | None,
    inputs: StepInputs,
) -> Callable[[], object]:
    """A step of ``stage`` of ``plan`` by the executor, ready to be called: stage and rank are the same number."""
    messenger = Messenger(channels, range(plan.stages), CPU)
    return partial(Executor(chunks, gradients, messenger, stage).run, lower(plan, stage, LOOKAHEAD), inputs)
