"""When graphs are captured, under which number, and that all ranks do it before one step, whosever no longer fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron_run.contracts import CaptureSize
from megatron_run.contracts.activity import Activity
from megatron_run.contracts.schedule import Action
from megatron_run_engine.runtime.rng import RandomStreams
from megatron_run_engine.runtime.segments import SegmentRunner
from megatron_run_engine.training.numbers import MISMATCH, Progress
from megatron_run_engine.training.step_runner import CapturePolicy
from megatron_run_testing.build_contexts import single_process_context

#: Step -> the ranks that find, before it, that their graphs do not fit.
Mismatches = Mapping[int, Sequence[int]]
#: What captures whole steps, where none are.
NO_STEPS: Any = MagicMock(mismatch="")


class Capture:
    """Says that it does not fit before the steps it is told of; ``log`` is what happened, by step."""

    def __init__(self, rank: int, capture_after: int, mismatches: Mismatches) -> None:
        self.capture_after, self._rank, self._mismatches = capture_after, rank, mismatches
        self.whole_step = False
        self.step, self.log = 0, list[str]()

    def regions(self, chunks: Any) -> tuple[str, ...]:
        return ("a region",)

    def plan(self, regions: Any, actions: Sequence[Action]) -> CaptureSize:
        return CaptureSize(1, 2, 1)

    def capture(self, regions: Any, actions: Sequence[Action], examples: Any) -> CaptureSize:
        self.log.append(f"captured before {self.step}")
        return self.plan(regions, actions)

    def mismatch(self, actions: Sequence[Action]) -> str:
        return "it was moved" if self._rank in self._mismatches.get(self.step, ()) else ""

    def invalidate(self, reason: str) -> None:
        self.log.append(f"gave up before {self.step}: {reason}")


class Rank:
    """One rank's steps; its metrics are collected after each."""

    def __init__(self, rank: int, capture_after: int, mismatches: Mismatches) -> None:
        context: Any = single_process_context()
        context.segments.watch = lambda _: None
        self.metrics, self.groups = context.metrics, context.groups
        self.capture = Capture(rank, capture_after, mismatches)
        plans = {1: SimpleNamespace(lists=[(Action("F", 0, 0), Action("B", 0, 0))])}
        run: Any = SimpleNamespace(plans=plans, one=str)
        batches: Any = SimpleNamespace(at=lambda _: 1, microbatches=lambda _: 1)
        assembly: Any = SimpleNamespace(context=context, graph_capture=self.capture, chunks=(), programs=None)
        self.steps = CapturePolicy(run, assembly, batches, Progress(), self.metrics.scalar(MISMATCH), NO_STEPS)

    def step(self, number: int) -> bool:
        """Whether this rank says that its graphs did not fit."""
        observers: Any = SimpleNamespace(on_capture=lambda _: None)
        self.capture.step = number
        self.steps.prepare(Progress(step=number - 1), observers)
        return MISMATCH in self.metrics.means(self.metrics.collect(self.groups).tolist())


@pytest.mark.parametrize("capture_after", [1, 2, 3])
@pytest.mark.parametrize(
    "mismatches",
    [{}, {5: [0]}, {5: [1]}, {5: [0, 1]}, {5: [0], 6: [1]}, {5: [0], 6: [0, 1], 9: [1]}],
    ids=["none", "the first", "the second", "both", "one after the other", "again and again"],
)
def test_ranks_capture_before_the_same_steps(mismatches: Mismatches, capture_after: int) -> None:
    ranks = [Rank(rank, capture_after, mismatches) for rank in range(2)]
    for number in range(1, 20):
        said = [rank.step(number) for rank in ranks]
        for rank in ranks:
            rank.steps.note_mismatch(mismatch=any(said))  # as the sum over the ranks is
    first, second = ([line for line in rank.capture.log if "captured" in line] for rank in ranks)
    assert first == second
    again = [f"captured before {5 + capture_after}"] if mismatches else []
    assert first[: 1 + len(again)] == [f"captured before {1 + capture_after}", *again]


def test_a_rank_whose_graphs_fit_gives_them_up_a_step_later_and_says_why() -> None:
    ranks = [Rank(rank, 1, {5: [0]}) for rank in range(2)]
    for number in range(1, 8):
        said = [rank.step(number) for rank in ranks]
        for rank in ranks:
            rank.steps.note_mismatch(mismatch=any(said))
    assert ranks[0].capture.log == ["captured before 2", "gave up before 5: it was moved", "captured before 6"]
    assert ranks[1].capture.log == [
        "captured before 2",
        "gave up before 6: those of another rank no longer fit",
        "captured before 6",
    ]


def test_the_step_that_is_watched_is_the_step_that_is_told() -> None:
    activity, watched, told = Activity(), list[tuple[int, str]](), list[int]()
    activity.listeners.append(lambda step, name, detail: watched.append((step, name)))
    capture = MagicMock(
        capture_after=1, whole_step=False, **{"regions.return_value": [MagicMock()], "mismatch.return_value": ""}
    )
    capture.capture.return_value = capture.plan.return_value = CaptureSize(1, 2, 1)
    context: Any = SimpleNamespace(
        segments=SegmentRunner(RandomStreams(1, torch.device("cpu"))),
        groups=SimpleNamespace(activity=activity),
        topology=SimpleNamespace(stage=0),
    )
    assembly: Any = SimpleNamespace(context=context, graph_capture=capture, chunks=(), programs=None)
    run: Any = SimpleNamespace(plans={1: SimpleNamespace(lists=[()])}, one=str)
    batches: Any = SimpleNamespace(at=lambda samples: 1, microbatches=lambda batch: 1)
    observers: Any = SimpleNamespace(on_capture=lambda metrics: told.append(metrics.step))
    progress: Any = SimpleNamespace(step=0, samples=0)
    steps = CapturePolicy(run, assembly, batches, progress, MagicMock(), NO_STEPS)
    for progress.step in (0, 1, 2):  # steps 1, 2 and 3
        steps.prepare(progress, observers)
        activity.step(progress.step + 1)
    assert watched == [(2, "capture")]
    assert told == [2]
