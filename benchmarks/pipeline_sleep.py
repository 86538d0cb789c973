"""The schedules with ``sleep`` for computation, to see whether a step takes as long as its plan says.

Sleeping needs no core, so four stages run at their own pace on two cores. A forward sleeps one unit, a whole backward
two, each half of a split backward one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline_quiet import take_sample
from megatron_run.actions import LayoutSpec, ScheduleSpec
from megatron_run.comm import create_groups
from megatron_run.contracts import Boundary, ChunkOut, Microbatch, Schedule, Segment
from megatron_run.gradients import Gradients
from megatron_run.pipeline.execute import Executor, StepInputs
from megatron_run.pipeline.lower import lower
from megatron_run.pipeline.messages import Messenger
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from megatron_run.topology import Sizes, Topology
from megatron_run.training.programs import LOOKAHEAD
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_gpipe import GPipe
from megatron_run_schedule_interleaved import Interleaved
from megatron_run_schedule_zero_bubble import ZeroBubbleH1, ZeroBubbleV

MICROBATCHES = 8
#: What is run: the schedule and its chunks a stage.
SCHEDULES: dict[str, tuple[Callable[[], Schedule], int]] = {
    "gpipe": (GPipe, 1),
    "1f1b": (OneForwardOneBackward, 1),
    "interleaved": (Interleaved, 2),
    "zb-h1": (ZeroBubbleH1, 1),
    "zb-v": (ZeroBubbleV, 2),
}
BOUNDARY = Boundary((1,), torch.float32)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, gradients: Gradients) -> Tensor:
        ctx.seconds, ctx.gradients = seconds, gradients
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        ctx.gradients.submit((), lambda: time.sleep(ctx.seconds))
        return grads[0], None, None


class Sleeper(nn.Module):
    """A chunk that sleeps ``seconds`` in its forward and in each half of its backward."""

    def __init__(self, seconds: float, gradients: Gradients, *, last: bool) -> None:
        super().__init__()
        self.seconds, self.gradients, self.last = seconds, gradients, last

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """Sleep, and hand on one number."""
        x = torch.zeros(BOUNDARY.resolve(), requires_grad=torch.is_grad_enabled()) if x is None else x
        y: Tensor = _Sleep.apply(x, self.seconds, self.gradients)  # type: ignore[no-untyped-call]  # torch's
        return ChunkOut(None, {"lm": (y.sum(), torch.ones(()))}) if self.last else ChunkOut(y)

    def segments(self) -> Sequence[Segment]:
        """None: there is nothing to capture."""
        return ()


def make_plan(name: str, stages: int, microbatches: int = MICROBATCHES) -> Plan:
    """The plan of schedule ``name``, one layer a place."""
    make, chunks = SCHEDULES[name]
    schedule = make()
    layout = schedule.layout(LayoutSpec(stages, chunks, stages * chunks))
    spec = ScheduleSpec(layout, stages, chunks, microbatches)
    return verify(spec, schedule.actions(spec))


def makespan(plan: Plan) -> float:
    """How long a step takes as planned, in units."""
    return max(ends[-1] for ends in plan.ends)


def ideal(plan: Plan) -> float:
    """How long it would take without any bubble, in units."""
    return plan.chunks * plan.microbatches * (plan.costs["F"] + plan.costs["B"])


def measure_sleep(unit: float, samples: int) -> list[dict[str, Any]]:
    """Per schedule: a step without a bubble and as planned, in seconds, and the samples taken."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    groups = create_groups(Topology(Sizes(pipeline=world), rank), dist.default_pg_timeout)
    inputs = StepInputs(
        microbatch=lambda m: Microbatch(m, 1, m, {}),
        boundary=lambda _: BOUNDARY,
        report=lambda *_: None,
        seed=lambda _, weight: weight,
    )
    for name in SCHEDULES:
        plan, gradients = make_plan(name, world), Gradients()
        mine = sorted((place.chunk, index) for index, place in enumerate(plan.layout) if place.stage == rank)
        chunks = [Sleeper(unit, gradients, last=position == len(plan.layout) - 1) for _, position in mine]
        messenger = Messenger(groups.channels, range(world), torch.device("cpu"))
        executor = Executor(chunks, gradients, messenger, rank)
        program = lower(plan, rank, LOOKAHEAD)
        taken = [take_sample(partial(executor.run, program, inputs)) for _ in range(samples + 1)][1:]
        described = {"schedule": name, "ideal": ideal(plan) * unit, "planned": makespan(plan) * unit}
        found.append({**described, "samples": [asdict(sample) for sample in taken]})
    return found
