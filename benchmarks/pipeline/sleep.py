"""The schedules with ``sleep`` for computation, to see whether a step takes as long as its plan says.

Sleeping needs no core, so four stages run at their own pace on two cores. A forward sleeps one unit, a whole backward
two, each half of a split backward one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.schedules import SCHEDULES, executed, make_plan, step_inputs
from benchmarks.support.quiet import take_sample, undisturbed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from megatron_run.contracts import Boundary, ChunkOut, Microbatch, Segment
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.pipeline.plan import Plan
from megatron_run_engine.runtime.comm import create_groups
from megatron_run_engine.runtime.gradients import GradientAccumulator

MICROBATCHES = 8
#: Seconds of a unit: long beside what a message and an action cost.
UNIT = 0.04
BOUNDARY = Boundary((1,), torch.float32)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, gradients: GradientAccumulator) -> Tensor:
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

    def __init__(self, seconds: float, gradients: GradientAccumulator, *, last: bool) -> None:
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
    for name in SCHEDULES:
        plan, gradients = make_plan(name, world, MICROBATCHES), GradientAccumulator()
        places = sorted((place.chunk, index) for index, place in enumerate(plan.layout) if place.stage == rank)
        chunks = [Sleeper(unit, gradients, last=position == len(plan.layout) - 1) for _, position in places]
        step = executed(plan, rank, chunks, gradients, groups.channels, step_inputs(BOUNDARY))
        taken = [take_sample(step) for _ in range(samples + 1)][1:]
        described = {"schedule": name, "ideal": ideal(plan) * unit, "planned": makespan(plan) * unit}
        found.append({**described, "samples": [asdict(sample) for sample in taken]})
    return found


def report(*, quick: bool) -> Iterator[str]:
    """Measure every schedule, and tell what was found."""
    yield f"\n## Sleeping {UNIT * 1000:.0f} ms a unit, P 4, M {MICROBATCHES}\n"
    found = on_ranks(measure_sleep, 4, {"unit": UNIT, "samples": 3 if quick else 10})
    columns = ("schedule", "planned, s", "measured, s", "ratio", "planned over ideal", "measured over ideal")
    yield from table((*columns, "samples used"), map(_row, found))


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Planned and measured step, and how much longer than without a bubble each is."""
    kept, planned, least = undisturbed(found["samples"]), found["planned"], found["ideal"]
    measured = statistics.median(sample["seconds"] for sample in kept.samples)
    times = (f"{number:.3f}" for number in (planned, measured, measured / planned))
    return found["schedule"], *times, f"{planned / least - 1:.4f}", f"{measured / least - 1:.4f}", str(kept)
