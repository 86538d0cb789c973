"""Decides before each step whether the step runs eagerly, is captured, or is replayed.

A capture runs the collectives of its layers, so all ranks must capture before the same step, although a graph may stop
fitting on one rank only. Agreement needs no extra collective. A rank with a mismatch runs its step eagerly, which
issues the same collectives as the other ranks' replays, and reports the mismatch among the step's metrics, which are
all-reduced over the world anyway. After that step all ranks drop their graphs, and all capture again at the step at
which the first rank would have.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from megatron_run.contracts import CaptureMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.contracts.actions import Action
    from megatron_run.planning import ResolvedRun
    from megatron_run.planning.batch_size import BatchSizes
    from megatron_run_engine.runtime.metrics import Meter
    from megatron_run_engine.training.build import Assembly
    from megatron_run_engine.training.numbers import Progress
    from megatron_run_engine.training.observers import Observers
    from megatron_run_engine.training.step_runner import StepRunner


class CapturePolicy:
    """Captures after ``capture_after`` eager steps, and again when the graphs no longer fit. Collective.

    ``mismatches`` is the meter that reports a mismatch of this rank's graphs with the step's metrics. ``steps`` runs
    the steps, and captures them where they are captured whole.
    """

    def __init__(
        self,
        run: ResolvedRun,
        assembly: Assembly,
        batches: BatchSizes,
        progress: Progress,
        mismatches: Meter,
        steps: StepRunner,
    ) -> None:
        self._run, self._context, self._batches = run, assembly.context, batches
        self._capture, self._steps, self._programs = assembly.graph_capture, steps, assembly.programs
        self._regions = tuple(self._capture.regions([chunk.segments() for chunk in assembly.chunks]))
        self._eager_until = progress.step + self._capture.capture_after
        #: Whether steps replay graphs.
        self.replays = False
        self._mismatch_elsewhere = False
        self._prepared = progress.step
        self._mismatches = mismatches
        self._context.segments.watch(self._regions)

    def note_mismatch(self, *, mismatch: bool) -> None:
        """Remember whether any rank's graphs did not fit the step that has just run."""
        self._mismatch_elsewhere = mismatch

    def prepare(self, progress: Progress, observers: Observers) -> None:
        """Prepare for the step after ``progress``. Report a capture to ``observers``."""
        if not self._regions:
            return
        step, microbatches = progress.step + 1, self._batches.microbatches(self._batches.at(progress.samples))
        actions = self._run.plans[microbatches].lists[self._context.topology.stage]
        if self.replays:
            self._drop_on_mismatch(step, actions)
        self._prepared = step
        if not self.replays and step > self._eager_until:
            observers.on_capture(self._record(step, actions, microbatches))

    def _drop_on_mismatch(self, step: int, actions: Sequence[Action]) -> None:
        reason = self._capture.mismatch(actions) or self._steps.mismatch
        if self._mismatch_elsewhere:
            # The other rank ran the previous step eagerly. Count the eager steps from there on this rank too.
            self._drop(reason or "those of another rank no longer fit", self._prepared)
        elif reason:
            self._mismatches.add(1.0)
            self._drop(reason, step)

    def _drop(self, reason: str, step: int) -> None:
        """Drop the graphs and run eagerly from ``step`` on."""
        self._capture.invalidate(reason)
        self._context.segments.replay_with(None)
        self._steps.forget()
        self.replays, self._eager_until = False, step + self._capture.capture_after - 1

    def _record(self, step: int, actions: Sequence[Action], microbatches: int) -> CaptureMetrics:
        activity = self._context.groups.activity
        activity.step(step)  # a capture belongs to the step that it precedes
        activity.enter("capture")
        start = time.perf_counter()
        if self._capture.whole_step:
            size = self._steps.capture(self._regions, actions, self._programs.training(microbatches))
        else:
            size = self._capture.capture(self._regions, actions, self._context.segments.examples)
            self._context.segments.replay_with(self._capture, str(self._run.one("graph-capture")))
        self.replays = True
        planned = self._capture.plan(self._regions, actions)
        return CaptureMetrics(step, planned, size, time.perf_counter() - start)
