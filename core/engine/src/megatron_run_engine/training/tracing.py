"""Times the actions of the steps that observers ask for, on the ranks of rank 0's pipeline group.

Without such a request one number is broadcast when training starts, and nothing afterwards.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run.contracts import StepTrace
from megatron_run.contracts.observer import Bar, Timeline
from megatron_run.pipeline.simulate import timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from megatron_run.contracts.topology import Scope
    from megatron_run.pipeline.plan import Plan
    from megatron_run_engine.runtime.comm import Groups
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.training.observers import Observers


#: Number of barriers that align the clocks. The tightest one bounds the error; some are disturbed by the scheduler.
ROUNDS = 10


class Offset(NamedTuple):
    """The seconds to add to a rank's clock to get rank 0's, and the largest possible error of that."""

    seconds: float
    error: float


def device_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds. On a GPU, reading it waits for the work launched so far.

    Only the caller's stream is awaited: messages in flight and gradient reductions continue.
    """
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return read


def barrier_rounds(groups: Groups, scope: Scope, device: torch.device, rounds: int = ROUNDS) -> list[list[float]]:
    """Return this rank's (entered, left) times of barriers, by the host's clock. Collective over ``scope``."""
    times = []
    token = torch.ones(1, device=device)
    for _ in range(rounds):
        entered = time.perf_counter()
        groups.max_(token, scope).item()  # a barrier: no rank has the maximum before every rank has entered
        times.append([entered, time.perf_counter()])
    return times


def clock_offset(first: Sequence[Sequence[float]], rank: Sequence[Sequence[float]]) -> Offset:
    """Return the offset of a rank's clock to rank 0's, from the (entered, left) times of both in the same barriers."""
    # Nobody leaves a barrier before everybody has entered it: entered_0 <= left_rank + offset, and
    # entered_rank + offset <= left_0. Each barrier bounds the offset from both sides; take the tightest bounds.
    low = max(entered - left for (entered, _), (_, left) in zip(first, rank, strict=True))
    high = min(left - entered for (_, left), (entered, _) in zip(first, rank, strict=True))
    return Offset((low + high) / 2, (high - low) / 2)


#: (start, end) of an action, in seconds.
Interval = tuple[float, float]


@dataclass(frozen=True)
class Tracing:
    """The steps to trace. ``plans`` maps a number of microbatches to its training plan."""

    steps: frozenset[int]
    plans: Mapping[int, Plan]
    context: BuildContext

    def clock(self, step: int) -> Callable[[], float] | None:
        """Return this rank's clock for ``step``, or None if the step or the rank is not traced."""
        if step not in self.steps or 0 not in self.context.topology.peers("pipeline"):
            return None
        return device_clock(self.context.device)

    def report(self, step: int, microbatches: int, times: Sequence[Interval], observers: Observers) -> None:
        """Gather every stage's ``times`` of the actions of ``step`` and report the trace on rank 0.

        Collective over the ranks that have a clock for this step.
        """
        plan = self.plans[microbatches]
        rounds, gathered = self._gather(plan, times)
        if self.context.topology.rank == 0:
            observers.on_trace(step_trace(step, plan, rounds, gathered))

    def _gather(self, plan: Plan, times: Sequence[Interval]) -> tuple[list[list[Interval]], list[list[Interval]]]:
        """Return the barrier times and the action times of every stage, each by its own clock."""
        # A gather as one all-reduce: each stage fills its row of zeros [stages, rounds + longest, 2].
        context, stage = self.context, self.context.topology.stage
        longest = max(map(len, plan.lists))
        rows = torch.zeros(plan.stages, ROUNDS + longest, 2, dtype=torch.float64)
        rows[stage, :ROUNDS] = _pairs(barrier_rounds(context.groups, "pipeline", context.device))
        rows[stage, ROUNDS : ROUNDS + len(times)] = _pairs(times)
        joined = context.groups.sum_(rows.to(context.device), "pipeline").tolist()
        return (
            [[(start, end) for start, end in row[:ROUNDS]] for row in joined],
            [
                [(start, end) for start, end in row[ROUNDS : ROUNDS + len(actions)]]
                for row, actions in zip(joined, plan.lists, strict=True)
            ],
        )


def start_tracing(plans: Mapping[int, Plan], context: BuildContext, observers: Observers, last: int) -> Tracing:
    """Ask rank 0's observers which steps up to ``last`` to trace, and broadcast the answer. Collective."""
    asked = [step for step in observers.traced_steps() if 1 <= step <= last]
    return Tracing(_broadcast_steps(asked, context), plans, context)


def _broadcast_steps(asked: Collection[int], context: BuildContext) -> frozenset[int]:
    """Return the steps that rank 0 asked for, on every rank: first their number, then the steps if there are any."""
    count = _from_rank_0([len(asked)], context).item()
    if not count:
        return frozenset()
    return frozenset(_from_rank_0(sorted(asked) or [0] * int(count), context).tolist())


def _from_rank_0(numbers: Sequence[int], context: BuildContext) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int64, device=context.device)
    return context.groups.broadcast_(tensor, 0, "world")


def _pairs(times: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(times, dtype=torch.float64).reshape(-1, 2)


def step_trace(
    step: int, plan: Plan, rounds: Sequence[Sequence[Interval]], times: Sequence[Sequence[Interval]]
) -> StepTrace:
    """Return the measured and the planned timeline of ``plan``, in stage 0's time from the first action's start.

    For each stage, ``rounds`` holds the (entered, left) times of the same barriers and ``times`` the (start, end) times
    of its actions, both by the stage's own clock.
    """
    offsets = [clock_offset(rounds[0], barriers) if stage else (0.0, 0.0) for stage, barriers in enumerate(rounds)]
    first = min(spans[0][0] + offset for spans, (offset, _) in zip(times, offsets, strict=True))
    stages = tuple(
        tuple(
            Bar(action, start + offset - first, end + offset - first)
            for action, (start, end) in zip(actions, spans, strict=True)
        )
        for actions, spans, (offset, _) in zip(plan.lists, times, offsets, strict=True)
    )
    return StepTrace(
        step=step,
        layout=plan.layout,
        ran=measured_timeline(stages),
        planned=timeline(plan, mean_costs(stages)),
        clock_error=max(error for _, error in offsets),
    )


def measured_timeline(stages: tuple[tuple[Bar, ...], ...]) -> Timeline:
    """Return the timeline of measured bars, with its makespan and bubble."""
    makespan = max(bars[-1].end for bars in stages)
    busy = sum(bar.end - bar.start for bar in chain.from_iterable(stages))
    return Timeline(stages, makespan, 1 - busy / (makespan * len(stages)))


def mean_costs(stages: Sequence[Sequence[Bar]]) -> dict[str, float]:
    """Return the mean time of each operation over all stages."""
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for bar in chain.from_iterable(stages):
        spent[bar.action.op].append(bar.end - bar.start)
    return {op: fmean(each) for op, each in spent.items()}
