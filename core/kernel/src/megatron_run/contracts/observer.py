"""The contract of kind ``observer``: watches a run and never changes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_run.contracts.actions import Action, Place
    from megatron_run.contracts.graph_capture import CaptureSize


class Bar(NamedTuple):
    """One action from ``start`` to ``end``, in units of one chunk's forward."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The bars of each stage, the time at which the last one ends, and the share of time stages wait on average."""

    stages: tuple[tuple[Bar, ...], ...]
    makespan: float
    bubble_fraction: float


@dataclass(frozen=True)
class DevicePeak:
    """The most dense TFLOP/s that one device can do in ``train.precision``, which the mfu of a step is a fraction of.

    ``source`` says where the number comes from: ``run.peak_tflops``, ``data sheet`` or ``measured``.
    """

    tflops: float
    source: str


@dataclass(frozen=True)
class RunSummary:
    """What an observer is told at the start.

    ``folder`` is the run folder; ``steps`` the last step; ``first_step`` where this attempt starts (1 unless resumed);
    ``config`` the resolved configuration and ``plan`` the chosen plugins, both as text; ``timeline`` one planned step
    of the pipeline; ``baselines`` losses of simple models by name; ``peak`` None where it is not known.
    """

    folder: Path
    attempt: int
    first_step: int
    steps: int
    parameters: int
    world_size: int
    config: str
    plan: str
    timeline: Timeline
    baselines: Mapping[str, float] = field(default_factory=dict)
    peak: DevicePeak | None = None


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one step, host floats; None where there is none. Names are those of ``metrics.jsonl``.

    ``loss`` in nats per token; ``time`` in seconds since the epoch; ``step_time_s`` in seconds; ``mfu`` is
    ``tflops_per_device`` over the device's peak; ``memory_peak_gib`` of rank 0; ``extra`` holds what plugins and the
    model report.
    """

    step: int
    time: float
    samples: int
    tokens: int
    loss: float | None
    grad_norm: float | None
    lr: float
    loss_scale: float
    skipped: bool
    skipped_total: int
    microbatches: int
    step_time_s: float
    tokens_per_s: float
    tflops_per_device: float
    mfu: float | None
    memory_peak_gib: float
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalMetrics:
    """The result of an evaluation: mean loss in nats per token over ``tokens`` tokens, and its perplexity."""

    step: int
    split: str
    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class CheckpointMetrics:
    """A saved step: its folder and its size in bytes.

    Training stood still for ``seconds``; ``write_seconds`` after its saving had begun the step was on the disk. The two
    differ where training goes on meanwhile (``checkpoint.async_save``).
    """

    step: int
    folder: Path
    size: int
    seconds: float
    write_seconds: float


@dataclass(frozen=True)
class CaptureMetrics:
    """Graphs were captured before ``step``, in ``seconds``: what was planned and what was made, on rank 0's stage."""

    step: int
    planned: CaptureSize
    captured: CaptureSize
    seconds: float


@dataclass(frozen=True)
class StepTrace:
    """One step on the timeline, as it ran and as it was planned, both in seconds.

    ``ran`` holds when each action was computed on the ranks of rank 0's pipeline group, a stage each, from the first
    action's start; waiting and messages are the gaps. ``planned`` is the verified plan with the mean time that each
    operation took in this step. Both hold the same actions and the same work in total, so ``ran.makespan /
    planned.makespan`` says what messages, waiting for them and unequal stages cost. ``layout`` is the plan's, in model
    order. ``clock_error``: when the step was done, the clock of each stage was aligned with that of stage 0 to within
    this many seconds; what they drift apart during the step comes on top.
    """

    step: int
    layout: tuple[Place, ...]
    ran: Timeline
    planned: Timeline
    clock_error: float = 0.0


class Observer:
    """Is called on rank 0 with host floats; does no communication. Override what you need.

    One that raises is named, logged, and disabled after three failures; training goes on. A whole working plugin::

        class Best(Observer):
            best = float("inf")

            def on_eval_end(self, metrics):
                self.best = min(self.best, metrics.loss)

        @hookimpl
        def megatron_run_create_observer(options):
            return Best()
    """

    def on_train_start(self, run: RunSummary) -> None:
        """Training is about to start."""

    def traced_steps(self) -> Collection[int]:
        """The steps, counted from 1, to be timed for ``on_trace``; asked once, after ``on_train_start``.

        Timing waits for the device around each action, so a traced step is slower on a GPU; no other step is.
        """
        return ()

    def on_step_end(self, metrics: StepMetrics) -> None:
        """One step is done."""

    def on_trace(self, trace: StepTrace) -> None:
        """A step that this observer asked for in ``traced_steps`` was timed; called after its ``on_step_end``."""

    def on_capture(self, metrics: CaptureMetrics) -> None:
        """Segments were captured; from this step on they are replayed."""

    def on_skip(self, metrics: StepMetrics) -> None:
        """The step just reported was skipped: a gradient was not finite."""

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        """An evaluation is done."""

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """A step was saved, and is on the disk."""

    def on_sample(self, text: str) -> None:
        """The model wrote ``text`` (``eval.sample`` tokens) at the end of training."""

    def on_error(self, error: BaseException) -> None:
        """The run is about to end with ``error``."""

    def on_train_end(self, reason: str) -> None:
        """Training ended: ``finished``, or why it stopped early."""
