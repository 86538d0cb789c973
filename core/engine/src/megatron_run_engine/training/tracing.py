"""Times the steps that observers ask for, on the ranks of rank 0's pipeline group.

Where nobody asks, one number is sent when training starts and nothing afterwards.
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
from megatron_run.pipeline.timeline import timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from megatron_run.pipeline.plan import Plan
    from megatron_run_engine.runtime.comm import Groups, Scope
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.training.observers import Observers


#: Barriers to align clocks by. The tightest counts, so it takes a few for one in which nobody was held up.
ROUNDS = 10


class Offset(NamedTuple):
    """What to add to a clock to read rank 0's, and by how much that may be wrong at most; seconds."""

    seconds: float
    error: float


def device_clock(device: torch.device) -> Callable[[], float]:
    """The host's clock in seconds; on a GPU, once the work that the caller has launched is done.

    Only the caller's stream is waited for: messages in flight and gradient reductions go on.
    """
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return read


def barrier_rounds(groups: Groups, scope: Scope, device: torch.device, rounds: int = ROUNDS) -> list[list[float]]:
    """This rank's (entered, left) of each barrier over ``scope``, by the host's clock. Collective over ``scope``."""
    times = []
    token = torch.ones(1, device=device)
    for _ in range(rounds):
        entered = time.perf_counter()
        groups.max_(token, scope).item()  # no rank has the maximum before every rank gave its number
        times.append([entered, time.perf_counter()])
    return times


def clock_offset(first: Sequence[Sequence[float]], rank: Sequence[Sequence[float]]) -> Offset:
    """The offset of a rank's clock to rank 0's from the (entered, left) of both in the same barriers."""
    low = max(entered - left for (entered, _), (_, left) in zip(first, rank, strict=True))
    high = min(left - entered for (_, left), (entered, _) in zip(first, rank, strict=True))
    return Offset((low + high) / 2, (high - low) / 2)


#: (start, end) of an action, in seconds.
Interval = tuple[float, float]


@dataclass(frozen=True)
class Tracing:
    """Which steps to time, and how. ``plans`` are the training plans by their number of microbatches."""

    steps: frozenset[int]
    plans: Mapping[int, Plan]
    context: BuildContext

    def clock(self, step: int) -> Callable[[], float] | None:
        """The clock of this rank for ``step``; None when the step, or the rank, is not traced."""
        if step not in self.steps or 0 not in self.context.topology.peers("pipeline"):
            return None
        return device_clock(self.context.device)

    def report(self, step: int, microbatches: int, times: Sequence[Interval], observers: Observers) -> None:
        """Bring the ``times`` of this stage's actions in ``step`` to rank 0 and its observers.

        Collective over the ranks that were given a clock.
        """
        plan = self.plans[microbatches]
        rounds, gathered = self._gather(plan, times)
        if self.context.topology.rank == 0:
            observers.on_trace(step_trace(step, plan, rounds, gathered))

    def _gather(self, plan: Plan, times: Sequence[Interval]) -> tuple[list[list[Interval]], list[list[Interval]]]:
        """The barriers and the actions' times of every stage, by each stage's own clock.

        Each stage fills its row of a tensor of zeros [stages, rounds + the most actions, 2], and the sum joins them.
        """
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
    """Ask the observers of rank 0 which of the steps up to ``last`` to time, and tell all ranks. Collective."""
    asked = [step for step in observers.traced_steps() if 1 <= step <= last]
    return Tracing(_shared(asked, context), plans, context)


def _shared(asked: Collection[int], context: BuildContext) -> frozenset[int]:
    """What rank 0 asked for, on every rank: how many steps, then which, if there are any."""
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
    """The timeline of ``plan`` as it ran, by stage 0's clock from the first action's start, and as it was planned.

    For each stage, ``rounds`` are its (entered, left) of the same barriers and ``times`` the (start, end) of its
    actions, both by its own clock.
    """
    offsets = [clock_offset(rounds[0], mine) if stage else (0.0, 0.0) for stage, mine in enumerate(rounds)]
    first = min(mine[0][0] + offset for mine, (offset, _) in zip(times, offsets, strict=True))
    stages = tuple(
        tuple(
            Bar(action, start + offset - first, end + offset - first)
            for action, (start, end) in zip(actions, mine, strict=True)
        )
        for actions, mine, (offset, _) in zip(plan.lists, times, offsets, strict=True)
    )
    return StepTrace(
        step=step,
        layout=plan.layout,
        ran=measured_timeline(stages),
        planned=timeline(plan, mean_costs(stages)),
        clock_error=max(error for _, error in offsets),
    )


def measured_timeline(stages: tuple[tuple[Bar, ...], ...]) -> Timeline:
    """The timeline of bars that were measured."""
    makespan = max(bars[-1].end for bars in stages)
    busy = sum(bar.end - bar.start for bar in chain.from_iterable(stages))
    return Timeline(stages, makespan, 1 - busy / (makespan * len(stages)))


def mean_costs(stages: Sequence[Sequence[Bar]]) -> dict[str, float]:
    """The mean time of each operation, over all stages."""
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for bar in chain.from_iterable(stages):
        spent[bar.action.op].append(bar.end - bar.start)
    return {op: fmean(each) for op, each in spent.items()}
