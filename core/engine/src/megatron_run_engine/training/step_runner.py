"""Runs the forwards and backwards of a training step: action by action, or all of them from one graph.

A graph of a whole step begins after the data is loaded and ends before gradients are reduced. What the host decides or
reads in a step lies outside: the data, the reductions between ranks, the check for overflow, clipping and the update,
whose learning rate is a number of the host.

:class:`CapturePolicy` decides before each step whether it runs eagerly, is captured, or is replayed. A capture runs the
collectives of its layers, so all ranks must capture before the same step, although a graph may stop fitting on one rank
only. Agreement needs no extra collective. A rank with a mismatch runs its step eagerly, which issues the same
collectives as the other ranks' replays, and reports the mismatch among the step's metrics, which are all-reduced over
the world anyway. After that step all ranks drop their graphs, and all capture again at the step at which the first rank
would have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor

from megatron_run.contracts import CaptureMetrics, Microbatch
from megatron_run.errors import GraphCaptureError
from megatron_run_engine.runtime.execute import StepInputs, StepRecord
from megatron_run_engine.runtime.segments import without_values

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import CaptureSize, Region
    from megatron_run.contracts.schedule import Action
    from megatron_run.pipeline.lower import Instruction
    from megatron_run.planning import ResolvedRun
    from megatron_run.planning.batch_size import BatchSizes
    from megatron_run_engine.runtime.metrics import Meter
    from megatron_run_engine.training.build import Assembly
    from megatron_run_engine.training.numbers import Progress
    from megatron_run_engine.training.observers import Observers

#: The gradient with which a loss starts its backward, from the number of microbatches, the loss's name and its weight.
Seed = Callable[[int, str, Tensor], Tensor]
#: Batch fields by name.
Fields = Mapping[str, Tensor]


class _Report(NamedTuple):
    """A loss as a chunk reported it, at fixed addresses."""

    microbatch: int
    name: str
    total: Tensor
    weight: Tensor


@dataclass(frozen=True)
class _Captured:
    """A step in a graph: its ``inputs`` by microbatch, what it reports, and which gradients arrive, in order."""

    inputs: Mapping[int, Microbatch]
    reports: Sequence[_Report]
    arrivals: Sequence[Parameter]
    record: StepRecord


class StepRunner:
    """Runs training steps of ``assembly``, whose losses start their backwards with ``seed``.

    ``mismatch`` is the reason why the captured step cannot serve the next one, empty if it can.
    """

    def __init__(self, assembly: Assembly, seed: Seed) -> None:
        self._assembly, self._seed = assembly, seed
        self._whole = assembly.graph_capture.whole_step
        self._fields: Fields = {}
        self._captured: _Captured | None = None
        self.mismatch = ""

    def run(
        self, program: Sequence[Instruction], inputs: StepInputs, clock: Callable[[], float] | None = None
    ) -> StepRecord:
        """Run ``program``; a step that is timed by ``clock`` runs action by action also where it is captured."""
        captured = self._captured
        if captured is None or clock is not None:
            if self._whole:
                inputs = replace(inputs, microbatch=partial(self._noted, inputs.microbatch))
            return self._assembly.executor.run(program, inputs, clock)
        self._assembly.context.groups.activity.enter("data")
        loaded = {index: inputs.microbatch(index) for index in captured.inputs}
        self.mismatch = _difference(captured.inputs, loaded)
        if self.mismatch:
            return self._assembly.executor.run(program, replace(inputs, microbatch=loaded.__getitem__))
        return self._replay(captured, program, inputs, loaded)

    def capture(
        self, regions: Sequence[Region], actions: Sequence[Action], program: Sequence[Instruction]
    ) -> CaptureSize:
        """Let the graph capture record ``program``, a step of ``actions``.

        Parameters and random streams keep their values. Raises :class:`GraphCaptureError` for a program with messages.
        """
        _check(program)
        assembly, context = self._assembly, self._assembly.context
        assembly.optimizer.finish_param_sync()
        microbatches = sorted({action.microbatch for action in actions if action.op == "F"})
        static = {index: self._static(index) for index in microbatches}
        reports: list[_Report] = []
        records: list[StepRecord] = []
        inputs = StepInputs(
            microbatch=static.__getitem__,
            boundary=_no_boundary,
            report=lambda *report: reports.append(_Report(*report)),
            seed=partial(self._seed, len(microbatches)),
        )
        examples = dict(context.segments.examples)
        if not assembly.graph_capture.replays_within:
            context.segments.watch(())  # what is recorded is no example
        context.gradients.start_recorded_step()
        try:
            with context.gradients.recording() as arrivals, context.rng.left_alone():
                size = assembly.graph_capture.capture_step(
                    lambda: records.append(assembly.executor.run(program, inputs)), regions, actions, examples
                )
        finally:
            context.segments.watch(regions)
        self._captured = _Captured(static, reports, tuple(arrivals), records[-1])
        held = sum(field.nbytes for microbatch in static.values() for field in microbatch.fields.values())
        return replace(size, static_bytes=held)

    def forget(self) -> None:
        """Run action by action from now on."""
        self._captured, self.mismatch = None, ""

    def _replay(
        self, captured: _Captured, program: Sequence[Instruction], inputs: StepInputs, loaded: Mapping[int, Microbatch]
    ) -> StepRecord:
        assembly, activity = self._assembly, self._assembly.context.groups.activity
        assembly.optimizer.finish_param_sync()
        activity.enter("forward", "and backward of the whole step")
        for index, microbatch in captured.inputs.items():
            for name, field in microbatch.fields.items():
                field.copy_(loaded[index].fields[name])
        assembly.graph_capture.replay_step()
        if inputs.report is not None:
            for report in captured.reports:
                inputs.report(*report)
        activity.enter("gradient-reduce")
        assembly.context.gradients.arrived(captured.arrivals)
        for instruction in program:
            if instruction.sync and inputs.start_grad_sync is not None:
                inputs.start_grad_sync(instruction.action.chunk)
        return replace(captured.record, executed=[instruction.action for instruction in program])

    def _noted(self, load: Callable[[int], Microbatch], index: int) -> Microbatch:
        """Load a microbatch, and remember what its fields look like."""
        microbatch = load(index)
        self._fields = {name: without_values(field) for name, field in microbatch.fields.items()}
        return microbatch

    def _static(self, index: int) -> Microbatch:
        """Microbatch ``index`` with fields of zeros, which are filled before each replay."""
        device = self._assembly.context.device
        fields = {
            name: torch.zeros(example.shape, dtype=example.dtype, device=device)
            for name, example in self._fields.items()
        }
        return Microbatch(index, 0, 0, fields)


def _difference(captured: Mapping[int, Microbatch], loaded: Mapping[int, Microbatch]) -> str:
    for index, microbatch in captured.items():
        for name, field in microbatch.fields.items():
            given = loaded[index].fields[name]
            if (given.shape, given.dtype) != (field.shape, field.dtype):
                shapes = f"{tuple(given.shape)} {given.dtype}", f"{tuple(field.shape)} {field.dtype}"
                return f"{name} of microbatch {index} is {shapes[0]} and was captured as {shapes[1]}"
    return ""


def _check(program: Sequence[Instruction]) -> None:
    """Raise :class:`GraphCaptureError` if this stage sends or receives anything in ``program``."""
    for instruction in program:
        if instruction.send or instruction.receive:
            raise GraphCaptureError(
                f"a step with {instruction.action} cannot be captured whole",
                why=f"it waits for message {instruction.receive or instruction.send}, and the host waits for messages",
                fix="name segments in graph-capture.scope instead of step",
            )


def _no_boundary(microbatch: Microbatch) -> NoReturn:
    raise AssertionError(f"a step without messages has no boundary (microbatch {microbatch.index})")


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
        size = self._captured(actions, microbatches)
        self.replays = True
        planned = self._capture.plan(self._regions, actions)
        return CaptureMetrics(step, planned, size, time.perf_counter() - start)

    def _captured(self, actions: Sequence[Action], microbatches: int) -> CaptureSize:
        """Capture regions, the step whole, or it with the regions within."""
        capture, segments, regions = self._capture, self._context.segments, None
        if not capture.whole_step or capture.replays_within:
            regions = capture.capture(self._regions, actions, segments.examples)
            segments.replay_with(capture, str(self._run.one("graph-capture")))
        if not capture.whole_step:
            assert regions is not None, "regions were captured"
            return regions
        try:
            step = self._steps.capture(self._regions, actions, self._programs.training(microbatches))
        except BaseException:
            segments.replay_with(None)
            raise
        if regions is None:
            return step
        return replace(step, regions=regions.regions, graphs=regions.graphs + step.graphs)
