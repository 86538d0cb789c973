"""A capture is told and watched under one number: that of the step before which it is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from megatron_run.contracts import CaptureSize
from megatron_run.phases import Phases
from megatron_run.rng import RandomStreams
from megatron_run.segments import SegmentRunner
from megatron_run.training.graphs import GraphSteps


def test_the_step_that_is_watched_is_the_step_that_is_told() -> None:
    phases, watched, told = Phases(), list[tuple[int, str]](), list[int]()
    phases.listeners.append(lambda step, name, detail: watched.append((step, name)))
    capture = MagicMock(capture_after=1, **{"regions.return_value": [MagicMock()], "misfit.return_value": ""})
    capture.capture.return_value = capture.plan.return_value = CaptureSize(1, 2, 1)
    context: Any = SimpleNamespace(
        segments=SegmentRunner(RandomStreams(1, torch.device("cpu"))),
        groups=SimpleNamespace(phases=phases),
        topology=SimpleNamespace(stage=0),
    )
    assembly: Any = SimpleNamespace(context=context, graph_capture=capture, chunks=())
    run: Any = SimpleNamespace(plans={1: SimpleNamespace(lists=[()])}, one=str)
    batches: Any = SimpleNamespace(at=lambda samples: 1, microbatches=lambda batch: 1)
    observers: Any = SimpleNamespace(on_capture=lambda metrics: told.append(metrics.step))
    progress: Any = SimpleNamespace(step=0, samples=0)
    steps = GraphSteps(run, assembly, batches, progress)
    for progress.step in (0, 1, 2):  # steps 1, 2 and 3
        steps.prepare(progress, observers)
        phases.step(progress.step + 1)
    assert watched == [(2, "capture")]
    assert told == [2]
