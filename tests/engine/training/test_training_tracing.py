"""A traced step: what ran, when, on every stage; and a run that nobody traces pays nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_run.config.request import Request
from megatron_run.contracts import Observer, StepMetrics, StepTrace
from megatron_run.contracts.observer import Bar
from megatron_run.contracts.schedule import Action
from megatron_run.pipeline.plan import Plan, positions
from megatron_run.pipeline.simulate import timeline
from megatron_run.planning import resolve
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.execute import Executor
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.tracing import ROUNDS, step_trace
from megatron_run_engine.training.trainer import train_rank
from tests.support.drawn_plans import interleaved_plan
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.training import shared_folder

SPLITS = {
    "sequential": (1, (), ()),
    "1f1b-p2": (2, ("schedule=1f1b",), ()),
    "interleaved-p2-v2": (2, ("schedule=interleaved",), ()),
    "zero-bubble-p2": (2, ("schedule=zero-bubble",), ()),
    "1f1b-p2-data-2": (4, ("schedule=1f1b",), ("parallel.data=2",)),
}
#: Of three steps the last two are traced; the run ends before the other.
TRACED = (2, 3, 10**30)
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier")


@dataclass
class Seen:
    """What a rank saw: rank 0's losses and traces, and of each rank what ran, timed or not, and the collectives."""

    losses: list[float | None] = field(default_factory=list)
    traces: list[StepTrace] = field(default_factory=list)
    executed: list[list[Action]] = field(default_factory=list)
    timed: list[tuple[str, bool]] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)


class Tracer(Observer):
    def __init__(self, steps: tuple[int, ...], seen: Seen) -> None:
        self.steps, self.seen = steps, seen

    def traced_steps(self) -> tuple[int, ...]:
        return self.steps

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.seen.losses.append(metrics.loss)

    def on_trace(self, trace: StepTrace) -> None:
        assert trace.step == len(self.seen.losses)
        self.seen.traces.append(trace)


def request_of(split: str) -> Request:
    world, plugins, sets = SPLITS[split]
    small = ("model.hidden_size=16", "train.sequence_length=8", "train.micro_batch_size=1", "train.global_batch_size=4")
    sets = (*sets, *small, "train.steps=3", "eval.batches=1", "observer.use=jsonl", "model.dropout=0.1")
    return Request(configs=("preset:tiny",), sets=sets, plugins=plugins, nproc=world)


@cache
def plan_of(split: str) -> Plan:
    plans = resolve(request_of(split)).plans
    return plans[max(plans)]


def three_runs(rank: int, world: int, request: str) -> list[Seen]:
    """A run without the code that traces, one in which nobody asks, and one that is traced."""
    with found_once():
        with mock.patch("megatron_run_engine.training.trainer.start_tracing") as start:
            start.return_value.clock.return_value = None
            without = train(rank, world, request, ())
        return [without, train(rank, world, request, ()), train(rank, world, request, TRACED)]


def train(rank: int, world: int, request: str, steps: tuple[int, ...]) -> Seen:
    seen = Seen()
    run = resolve(Request.from_json(request), objects=(Tracer(steps, seen),))
    with shared_folder(rank, world) as folder, watched(seen):
        train_rank(run, World(rank=rank, size=world), RunFolder(folder, 1), StopRequest())
    return seen


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    execute = Executor.run

    def run(self: Executor, program: Any, inputs: Any, clock: Any = None) -> Any:
        record = execute(self, program, inputs, clock)
        seen.timed.append(("eval" if inputs.seed is None else "train", clock is not None))
        seen.executed.append(record.executed)
        return record

    def counted(name: str) -> Any:
        collective = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            seen.collectives.append(name)
            return collective(*arguments, **options)

        return mock.patch.object(dist, name, call)

    with mock.patch.object(Executor, "run", run):
        patches = [counted(name) for name in COLLECTIVES]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


@cache
def trained(split: str) -> list[list[Seen]]:
    """The three runs, each with what every rank saw."""
    by_rank = run_ranks(three_runs, SPLITS[split][0], request_of(split).to_json(), timeout=280)
    return [list(run) for run in zip(*by_rank, strict=True)]


def stage_ranks(split: str) -> list[int]:
    """The ranks of rank 0's pipeline group; data is the faster axis."""
    world = SPLITS[split][0]
    return list(range(0, world, world // plan_of(split).stages))


def on_every_split(test: Any) -> Any:
    """By day one rank, chunks, and 1F1B where each stage has several ranks, of which one is traced."""
    rare = ("1f1b-p2", "zero-bubble-p2")
    splits = [pytest.param(split, marks=[pytest.mark.nightly] * (split in rare)) for split in SPLITS]
    return pytest.mark.multiproc(pytest.mark.parametrize("split", splits)(test))


@on_every_split
def test_the_bars_are_the_actions_that_ran_in_the_order_of_the_plan(split: str) -> None:
    ranks, plan = trained(split)[2], plan_of(split)
    assert [trace.step for trace in ranks[0].traces] == [2, 3]
    for trace in ranks[0].traces:
        assert trace.layout == plan.layout
        for stage, rank in enumerate(stage_ranks(split)):
            ran = [bar.action for bar in trace.ran.stages[stage]]
            assert ran == ranks[rank].executed[trace.step - 1] == list(plan.lists[stage])
            assert [bar.action for bar in trace.planned.stages[stage]] == ran


@on_every_split
def test_a_stage_does_one_thing_at_a_time_and_the_step_starts_at_zero(split: str) -> None:
    for trace in trained(split)[2][0].traces:
        bars = [bar for stage in trace.ran.stages for bar in stage]
        assert all(bar.start < bar.end for bar in bars)
        assert all(one.end <= other.start for stage in trace.ran.stages for one, other in pairwise(stage))
        assert min(bar.start for bar in bars) == 0
        assert max(bar.end for bar in bars) == trace.ran.makespan
        busy = sum(bar.end - bar.start for bar in bars)
        assert trace.ran.bubble_fraction == pytest.approx(1 - busy / len(trace.ran.stages) / trace.ran.makespan)


@on_every_split
def test_a_message_is_used_after_it_was_made_as_far_as_the_clocks_tell(split: str) -> None:
    for trace in trained(split)[2][0].traces:
        for made, used in messages(trace):
            assert made.end <= used.start + 2 * trace.clock_error + 1e-9, f"{made} is used by {used}"


def messages(trace: StepTrace) -> Iterator[tuple[Bar, Bar]]:
    """What makes and what uses each activation and each gradient, from the layout."""
    position_of = positions(trace.layout)
    forwards, backwards = (
        {
            (position_of[stage, bar.action.chunk], bar.action.microbatch): bar
            for stage, bars in enumerate(trace.ran.stages)
            for bar in bars
            if bar.action.op in ops
        }
        for ops in ("F", "BI")
    )
    for (position, microbatch), bar in forwards.items():
        if position:
            yield forwards[position - 1, microbatch], bar
            yield backwards[position, microbatch], backwards[position - 1, microbatch]


@on_every_split
def test_the_plan_takes_the_mean_time_of_each_operation(split: str) -> None:
    plan = plan_of(split)
    for trace in trained(split)[2][0].traces:
        took: dict[str, list[float]] = {}
        for bar in (bar for stage in trace.ran.stages for bar in stage):
            took.setdefault(bar.action.op, []).append(bar.end - bar.start)
        costs = {op: sum(each) / len(each) for op, each in took.items()}
        expected = timeline(plan, costs)
        assert trace.planned.makespan == pytest.approx(expected.makespan)
        assert trace.planned.bubble_fraction == pytest.approx(expected.bubble_fraction)


@on_every_split
def test_tracing_changes_no_loss(split: str) -> None:
    without, untraced, traced = (run[0].losses for run in trained(split))
    assert len(traced) == 3
    assert without == untraced == traced


@on_every_split
def test_only_the_steps_that_were_asked_for_are_timed_and_only_by_rank_0s_pipeline(split: str) -> None:
    without, untraced, traced = trained(split)
    assert {timed for run in (without, untraced) for seen in run for timed in seen.timed} == {
        ("train", False),
        ("eval", False),
    }
    for rank, seen in enumerate(traced):
        here = rank in stage_ranks(split)
        assert seen.timed == [("train", False), ("train", here), ("train", here), ("eval", False)]


@on_every_split
def test_a_run_that_nobody_traces_sends_one_number_at_its_start_and_no_more(split: str) -> None:
    for rank, (without, untraced, traced) in enumerate(zip(*trained(split), strict=True)):
        alone = SPLITS[split][0] == 1
        assert untraced.collectives.count("broadcast") - without.collectives.count("broadcast") == (not alone)
        assert untraced.collectives.count("all_reduce") == without.collectives.count("all_reduce")
        assert len(untraced.collectives) - len(without.collectives) == (not alone)
        timed = 0 if alone or rank not in stage_ranks(split) else 2 * (ROUNDS + 1)
        assert len(traced.collectives) - len(without.collectives) == 2 * (not alone) + timed


def test_stages_with_clocks_of_their_own_are_drawn_where_they_ran() -> None:
    plan, ahead = interleaved_plan(), [0.0, 1234.5, -77.0, 0.125]
    assert plan.stages == len(ahead)
    real = timeline(plan, {"F": 0.01, "B": 0.02})
    times = [
        [(50 + a + bar.start, 50 + a + bar.end) for bar in bars] for a, bars in zip(ahead, real.stages, strict=True)
    ]
    rounds = [[(90 + a, 90.001 + a), (91 + a, 91.0004 + a)] for a in ahead]
    trace = step_trace(7, plan, rounds, times)
    assert trace.step == 7
    assert trace.clock_error == pytest.approx(0.0004)
    for drawn, expected in ((trace.ran, real), (trace.planned, real)):
        assert drawn.makespan == pytest.approx(expected.makespan)
        assert drawn.bubble_fraction == pytest.approx(expected.bubble_fraction)
        for bars, real_bars in zip(drawn.stages, expected.stages, strict=True):
            for bar, real_bar in zip(bars, real_bars, strict=True):
                assert bar.action == real_bar.action
                assert (bar.start, bar.end) == pytest.approx((real_bar.start, real_bar.end), abs=1e-9)
