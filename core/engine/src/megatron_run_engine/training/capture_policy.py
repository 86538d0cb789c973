"""When graphs are captured: before each step it is decided whether the step runs eagerly or is replayed.

A capture runs the collectives of the layers in it, so ranks must capture before the same step, though what no longer
fits may be one rank's alone. That needs no collective of its own: who finds a mismatch runs eagerly, with the
collectives of the others' replays, and says so among the metrics of that step, which are summed over the world anyway.
After it all give up their graphs, and all capture again when the first one would have.
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


class CapturePolicy:
    """Captures after enough eager steps, and again where what was captured no longer fits. Collective.

    ``mismatches`` carries among a step's metrics that graphs of this rank did not fit it.
    """

    def __init__(
        self, run: ResolvedRun, assembly: Assembly, batches: BatchSizes, progress: Progress, mismatches: Meter
    ) -> None:
        self._run, self._context, self._batches = run, assembly.context, batches
        self._capture = assembly.graph_capture
        self._regions = tuple(self._capture.regions([chunk.segments() for chunk in assembly.chunks]))
        self._eager_until = progress.step + self._capture.capture_after
        self._replays = self._misfit_elsewhere = False
        self._prepared = progress.step
        self._mismatches = mismatches
        self._context.segments.watch(self._regions)

    def hear(self, *, mismatch: bool) -> None:
        """Whether some rank's graphs did not fit the step that is done."""
        self._misfit_elsewhere = mismatch

    def prepare(self, progress: Progress, observers: Observers) -> None:
        """Make ready for the step after ``progress``; ``observers`` are told of a capture."""
        if not self._regions:
            return
        step, microbatches = progress.step + 1, self._batches.microbatches(self._batches.at(progress.samples))
        actions = self._run.plans[microbatches].lists[self._context.topology.stage]
        if self._replays:
            self._give_up_misfits(step, actions)
        self._prepared = step
        if not self._replays and step > self._eager_until:
            observers.on_capture(self._record(step, actions))

    def _give_up_misfits(self, step: int, actions: Sequence[Action]) -> None:
        reason = self._capture.mismatch(actions)
        if self._misfit_elsewhere:  # since the step before, and these count their eager steps from there
            self._give_up(reason or "those of another rank no longer fit", self._prepared)
        elif reason:
            self._mismatches.add(1.0)
            self._give_up(reason, step)

    def _give_up(self, reason: str, step: int) -> None:
        """Run eagerly from ``step`` on."""
        self._capture.invalidate(reason)
        self._context.segments.replay_with(None)
        self._replays, self._eager_until = False, step + self._capture.capture_after - 1

    def _record(self, step: int, actions: Sequence[Action]) -> CaptureMetrics:
        activity = self._context.groups.activity
        activity.step(step)  # the one that observers are told of
        activity.enter("capture")
        start = time.perf_counter()
        size = self._capture.capture(self._regions, actions, self._context.segments.examples)
        self._context.segments.replay_with(self._capture, str(self._run.one("graph-capture")))
        self._replays = True
        planned = self._capture.plan(self._regions, actions)
        return CaptureMetrics(step, planned, size, time.perf_counter() - start)
