"""The contract of kind ``observer``: it sees the events of a run and never changes it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_run.contracts.graph_capture import CaptureSize
    from megatron_run.contracts.schedule import Action, Place


#: The step of an attempt that is observed closely by default; the first steps are slower than the others.
SETTLED = 10
#: Name of a curve -> field of :class:`StepMetrics`.
STEP_CURVES: Mapping[str, str] = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/lr": "lr",
    "train/skipped": "skipped_total",
    "scaler/scale": "loss_scale",
    "speed/step_s": "step_time_s",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/tflops_per_device": "tflops_per_device",
    "speed/mfu": "mfu",
    "memory/peak_gib": "memory_peak_gib",
    "data/samples": "samples",
    "data/tokens": "tokens",
}


class Bar(NamedTuple):
    """One action from ``start`` to ``end``, in units of one chunk's forward."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The bars of each stage, the end of the last one, and the share of time that stages wait on average."""

    stages: tuple[tuple[Bar, ...], ...]
    makespan: float
    bubble_fraction: float


@dataclass(frozen=True)
class DevicePeak:
    """The most dense TFLOP/s that one device can do in ``train.precision``. MFU is the fraction that a step reaches.

    ``source`` says where the number comes from: ``run.peak_tflops`` or ``data sheet``.
    """

    tflops: float
    source: str


@dataclass(frozen=True)
class RunSummary:
    """A run at the start of training.

    ``folder`` is the run folder, ``steps`` the last step, and ``first_step`` the first step of this attempt (1 unless
    resumed). ``config`` is the resolved configuration and ``plan`` the chosen plugins, both as text. ``timeline`` is
    one planned step of the pipeline; ``baselines`` are losses of simple models by name; ``peak`` is None if unknown.
    ``data`` is what the data says of its training split, often nothing.
    ``run_id`` is the same in every attempt, and no other run has it. ``resumed`` is the folder of the saved step that
    it goes on from, None at a first step; ``changes`` are the configuration keys that differ from those with which that
    step was saved, with old and new value.
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
    run_id: str = ""
    resumed: Path | None = None
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    data: str = ""


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step as numbers on the host, None if there is no value; named as in ``metrics.jsonl``.

    ``loss`` is in nats per token, ``time`` in seconds since the epoch, ``step_time_s`` in seconds; ``memory_peak_gib``
    is that of rank 0; ``mfu`` is ``tflops_per_device`` over the peak of the device. ``extra`` holds the metrics that
    plugins and the model report.
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

    def curves(self) -> dict[str, float]:
        """The finite values by their names in ``STEP_CURVES``; those of ``extra`` keep their own names."""
        values = {name: getattr(self, field) for name, field in STEP_CURVES.items()} | dict(self.extra)
        return _finite(values)


@dataclass(frozen=True)
class EvalMetrics:
    """The result of an evaluation: mean loss in nats per token over ``tokens`` tokens, and its perplexity.

    ``split`` is that of the data, or the name of a task; ``extra`` has the metrics of the task's own, as ``accuracy``.
    """

    step: int
    split: str
    loss: float
    perplexity: float
    tokens: int
    extra: Mapping[str, float] = field(default_factory=dict)

    def curves(self) -> dict[str, float]:
        """The finite values as ``eval/loss`` and the like; those of another split or task as ``eval_test/loss``."""
        group = "eval" if self.split == "validation" else f"eval_{self.split}"
        values = {"loss": self.loss, "perplexity": self.perplexity, **self.extra}
        return _finite({f"{group}/{name}": value for name, value in values.items()})


@dataclass(frozen=True)
class CheckpointMetrics:
    """A saved step: its folder and its ``size`` in bytes.

    Training paused for ``seconds``; the save was complete on disk after ``write_seconds``. They differ if training
    continues while the step is written (``checkpoint.async_save``).
    """

    step: int
    folder: Path
    size: int
    seconds: float
    write_seconds: float


@dataclass(frozen=True)
class CaptureMetrics:
    """A capture before ``step``, which took ``seconds``: its planned and its real size, on rank 0's stage."""

    step: int
    planned: CaptureSize
    captured: CaptureSize
    seconds: float


@dataclass(frozen=True)
class StepTrace:
    """The timeline of one step, measured and planned, both in seconds.

    ``ran`` holds when each action was computed, from the start of the first action, on the ranks of rank 0's pipeline
    group, one per stage; gaps are waits and messages. ``planned`` is the verified plan, with the mean time that each
    operation took in this step as its cost. Both contain the same actions and the same total work, so
    ``ran.makespan / planned.makespan`` is the cost of messages, of waiting for them, and of unequal stages. ``layout``
    is the plan's, in model order. ``clock_error``: after the step, each stage's clock was aligned with that of stage 0
    to within this many seconds; drift during the step adds to it.
    """

    step: int
    layout: tuple[Place, ...]
    ran: Timeline
    planned: Timeline
    clock_error: float = 0.0


class Observer:
    """Receives the events of a run on rank 0, with numbers on the host. Override the methods that you need.

    An observer never communicates with other ranks. If one raises, the error is logged under its name and training
    continues; after three failures the observer is disabled.

    A whole working plugin::

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
        """The steps, counted from 1, to time for ``on_trace``; called once, after ``on_train_start``.

        Timing synchronises with the device around each action, so on a GPU a traced step is slower; other steps are
        not.
        """
        return ()

    def on_step_end(self, metrics: StepMetrics) -> None:
        """A step is done."""

    def on_trace(self, trace: StepTrace) -> None:
        """A step of :meth:`traced_steps` was timed; called after its ``on_step_end``."""

    def on_capture(self, metrics: CaptureMetrics) -> None:
        """Segments were captured; from this step on they are replayed."""

    def on_skip(self, metrics: StepMetrics) -> None:
        """The step just reported was skipped: a gradient was not finite."""

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        """An evaluation is done."""

    def on_later_eval(self, folder: Path, metrics: EvalMetrics) -> None:
        """A saved step of the run in ``folder`` was evaluated by ``megatron-run eval``; no other event comes."""

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """A step was saved and is complete on disk."""

    def on_sample(self, text: str) -> None:
        """The model generated ``text`` (``eval.sample`` tokens) at the end of training."""

    def on_error(self, error: BaseException) -> None:
        """The run is about to end with ``error``."""

    def on_train_end(self, reason: str) -> None:
        """Training ended; ``reason`` is ``finished``, or why it stopped early."""


def read_steps(text: str) -> range:
    """The steps of ``5-8``, or of ``5`` alone, for the option of an observer. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,15})(?:-([0-9]{1,15}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError("it must be a step, as 5, or first-last, as 5-8, counted from 1")
    return range(first, last + 1)


def steps_text(value: object) -> str | None:
    """An option that chooses steps, checked, as text; YAML reads a single step as a number. Raises ValueError."""
    if value is None:
        return None
    text = "" if isinstance(value, bool | float) else str(value)
    read_steps(text)
    return text


def steps_of(chosen: str | None, run: RunSummary) -> range:
    """The steps of ``chosen`` that this attempt runs; None: its tenth, since the first ones are slower, or its last."""
    settled = min(run.first_step + SETTLED - 1, run.steps)
    wanted = read_steps(chosen) if chosen else range(settled, settled + 1)
    return range(max(run.first_step, wanted.start), min(run.steps + 1, wanted.stop))


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and isfinite(value)}
