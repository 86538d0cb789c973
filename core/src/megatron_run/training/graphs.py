"""When graphs are captured: before each step it is decided whether the step runs eagerly or is replayed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from megatron_run.contracts import CaptureMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.actions import Action
    from megatron_run.batch_size import BatchSizes
    from megatron_run.resolve import ResolvedRun
    from megatron_run.training.build import Assembly
    from megatron_run.training.numbers import Progress
    from megatron_run.training.observing import Observers


class GraphSteps:
    """Captures after enough eager steps, and again where what was captured no longer fits. Collective."""

    def __init__(self, run: ResolvedRun, assembly: Assembly, batches: BatchSizes, progress: Progress) -> None:
        self._run, self._context, self._batches = run, assembly.context, batches
        self._capture = assembly.graph_capture
        self._regions = tuple(self._capture.regions([chunk.segments() for chunk in assembly.chunks]))
        self._eager_until = progress.step + self._capture.capture_after
        self._replays = False
        self._context.segments.watch(self._regions)

    def prepare(self, progress: Progress, observers: Observers) -> None:
        """Make ready for the step after ``progress``; ``observers`` are told of a capture."""
        if not self._regions:
            return
        step, microbatches = progress.step + 1, self._batches.microbatches(self._batches.at(progress.samples))
        actions = self._run.plans[microbatches].lists[self._context.topology.stage]
        reason = self._capture.misfit(actions) if self._replays else ""
        if reason:
            self._capture.invalidate(reason)
            self._context.segments.replay_with(None)
            self._replays, self._eager_until = False, step + self._capture.capture_after - 1
        if not self._replays and step > self._eager_until:
            observers.on_capture(self._record(step, actions))

    def _record(self, step: int, actions: Sequence[Action]) -> CaptureMetrics:
        phases = self._context.groups.phases
        phases.step(step)  # the one that observers are told of
        phases.enter("capture")
        start = time.perf_counter()
        size = self._capture.capture(self._regions, actions, self._context.segments.examples)
        self._context.segments.replay_with(self._capture, str(self._run.one("graph-capture")))
        self._replays = True
        planned = self._capture.plan(self._regions, actions)
        return CaptureMetrics(step, planned, size, time.perf_counter() - start)
