"""observer=console: shows progress as a bar on a terminal or in a notebook, elsewhere as a bounded number of lines."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from megatron_run.contracts import (
    CaptureMetrics,
    CheckpointMetrics,
    DevicePeak,
    EvalMetrics,
    Observer,
    PluginInfo,
    RunSummary,
    StepMetrics,
    scale_text,
)
from megatron_run.errors.wording import duration, plural
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.checkpoint.files import size_text
from megatron_run_engine.host.in_place import InPlace, in_place

#: Evenly spaced step lines of a run in plain form. With the lines of its first steps it prints some fifty.
LINES = 36
#: Control characters, which a terminal would execute. Text that a model wrote may contain any of them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ConsoleOptions(BaseModel):
    """The options of observer console."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plain: bool = Field(False, description="lines instead of a progress bar, on terminals too")


class ProgressView(ABC):
    """How the steps of a run are shown."""

    @abstractmethod
    def step(self, metrics: StepMetrics, left_s: float) -> None:
        """Show a finished step. ``left_s`` is the expected number of seconds to the end of the run."""

    def stop(self) -> None:  # noqa: B027  # lines have nothing to stop
        """Restore the terminal for other output."""


class LiveBar(ProgressView):
    """A bar that is redrawn in place, on a terminal or in a notebook."""

    def __init__(self, run: RunSummary, bar: InPlace) -> None:
        self._bar = bar
        self._bar.show(run.first_step - 1, "starting")

    def step(self, metrics: StepMetrics, left_s: float) -> None:
        """Draw the bar if it is time to."""
        left = f"  {duration(left_s)} left" if left_s else ""
        self._bar.show(metrics.step, f"{step_loss(metrics)}  {rate(metrics)}{left}")

    def stop(self) -> None:
        """Draw the bar a last time and restore the cursor."""
        self._bar.stop()


class Lines(ProgressView):
    """Lines at steps 1, 2, 4, 8, ... and then at equal intervals, so that the log of a long run stays readable."""

    def __init__(self, run: RunSummary, console: Console) -> None:
        self._run, self._console = run, console
        self._period = -(-(run.steps - run.first_step + 1) // LINES)

    def step(self, metrics: StepMetrics, left_s: float) -> None:
        """Print the step if it is one of those to show."""
        done = metrics.step - self._run.first_step + 1
        early = done < self._period and done & (done - 1) == 0  # a power of two
        if early or done % self._period == 0 or metrics.step == self._run.steps:
            step = f"step {metrics.step:>{len(str(self._run.steps))}}/{self._run.steps}"
            left = f"  {duration(left_s)} left" if left_s else ""
            say(self._console, f"{step}  {numbers(metrics)}{left}")


class ConsoleObserver(Observer):
    """Reports the run to a person at the terminal."""

    def __init__(self, options: ConsoleOptions, console: Console | None = None) -> None:
        self._console = console or Console()
        self._plain = options.plain
        self._progress: ProgressView | None = None
        self._run: RunSummary | None = None
        self._start: StepMetrics | None = None
        self._last: StepMetrics | None = None
        self._validation: EvalMetrics | None = None

    def on_train_start(self, run: RunSummary) -> None:
        """Print the size of the model, the ranks, the run folder and the baselines."""
        ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
        say(self._console, f"{run.parameters:,} parameters on {ranks}, steps {run.first_step} to {run.steps}")
        say(self._console, f"run folder {run.folder}")
        if run.data:
            say(self._console, run.data)
        if run.resumed:
            say(self._console, f"resumed from {run.resumed}")
        if run.peak:
            say(self._console, f"mfu is relative to {peak_text(run.peak)}")
        if run.baselines:
            say(self._console, "to compare with: " + ", ".join(f"{k} {v:.3f}" for k, v in run.baselines.items()))
        self._run = run
        bar = None if self._plain else in_place(self._console, "step", run.steps)
        self._progress = Lines(run, self._console) if bar is None else LiveBar(run, bar)

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Show the step."""
        self._last = metrics
        self._start = self._start or metrics
        if self._progress:
            self._progress.step(metrics, self._left(metrics))

    def _left(self, metrics: StepMetrics) -> float:
        """Return the seconds left at the mean pace so far, evaluations included."""
        if self._run is None or self._start is None:
            return 0.0
        steps = metrics.step - self._start.step
        pace = (metrics.time - self._start.time) / steps if steps > 0 else metrics.step_time_s
        return pace * (self._run.steps - metrics.step)

    def on_capture(self, metrics: CaptureMetrics) -> None:
        """Print what was captured on rank 0, and whether it is what was planned."""
        captured, planned = metrics.captured, metrics.planned
        same = (captured.regions, captured.graphs, captured.slots) == (planned.regions, planned.graphs, planned.slots)
        as_planned = "as planned" if same else f"planned were {planned}"
        here = " on rank 0 (stage 0):" if self._run and self._run.world_size > 1 else ""
        say(self._console, f"step {metrics.step}  captured{here} {captured} in {metrics.seconds:.1f} s, {as_planned}")

    def on_skip(self, metrics: StepMetrics) -> None:
        """Print the 1st, 2nd, 4th, 8th, ... skipped step, so that many of them do not flood the terminal."""
        if metrics.skipped_total & (metrics.skipped_total - 1) == 0:
            details = f"{metrics.skipped_total} so far, loss scale {scale_text(metrics.loss_scale)}"
            say(self._console, f"step {metrics.step} skipped: a gradient is not finite ({details})")

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        """Print the loss, and keep that of the validation split for the end."""
        if metrics.split == "validation":
            self._validation = metrics
        say(self._console, f"step {metrics.step}  {loss_text(metrics)}")

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Print that the step is saved."""
        asynchronous = metrics.write_seconds > metrics.seconds
        still = f", training stood still for {metrics.seconds:.1f} s" if asynchronous else ""
        size = size_text(metrics.size)
        say(self._console, f"step {metrics.step}  saved {size} in {metrics.write_seconds:.1f} s{still}")

    def on_sample(self, text: str) -> None:
        """Print the text that the model wrote, without control characters."""
        harmless = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
        say(self._console, f"the model writes:\n{harmless}")

    def on_error(self, error: BaseException) -> None:
        """Remove the bar. The launcher prints the error."""
        self._stop()

    def on_train_end(self, reason: str) -> None:
        """Print how far the run came, and its loss beside the baselines. What stopped it is said by the launcher."""
        self._stop()
        if self._last and self._start:
            steps = self._last.step - self._start.step + 1
            took = duration(self._last.time - self._start.time + self._start.step_time_s)
            end = "finished: " if reason == "finished" else ""
            say(self._console, f"{end}{plural(steps, 'step')} in {took}")
            if self._last.skipped_total:
                skipped = self._last.skipped_total
                say(self._console, f"{plural(skipped, 'step')} {'was' if skipped == 1 else 'were'} skipped")
        if self._validation and self._run:
            say(self._console, loss_text(self._validation) + comparison(self._validation.loss, self._run.baselines))

    def _stop(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None


def say(console: Console, text: str) -> None:
    """Print ``text`` without markup or wrapping. Characters outside the terminal's encoding become ``?``."""
    # A terminal or pipe in ASCII would otherwise raise UnicodeEncodeError in the middle of a training.
    shown = text.encode(console.encoding, "replace").decode(console.encoding)
    if console.is_jupyter:
        print(shown, file=console.file)  # rich would make each line an output of its own, as HTML
    else:
        console.print(shown, markup=False, highlight=False, emoji=False, soft_wrap=True)


def numbers(metrics: StepMetrics) -> str:
    """Return the numbers of a step for a line."""
    norm = "" if metrics.grad_norm is None else f"  grad norm {metrics.grad_norm:.3g}"
    mfu = "" if metrics.mfu is None else f"  mfu {metrics.mfu:.0%}"
    return f"{step_loss(metrics)}{norm}  lr {metrics.lr:.2e}  {rate(metrics)}{mfu}"


def peak_text(peak: DevicePeak) -> str:
    """``989 TFLOP/s a device (data sheet)``."""
    return f"{peak.tflops:.3g} TFLOP/s a device ({peak.source})"


def step_loss(metrics: StepMetrics) -> str:
    """Return ``loss 2.3456``, or ``no loss``."""
    return "no loss" if metrics.loss is None else f"loss {metrics.loss:.4f}"


def rate(metrics: StepMetrics) -> str:
    """Return ``12.3k tokens/s``."""
    return f"{amount(metrics.tokens_per_s)} tokens/s"


def loss_text(metrics: EvalMetrics) -> str:
    """Return ``validation loss 1.932 (perplexity 6.9)``, and a task's own metrics."""
    own = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in metrics.extra.items())
    return f"{metrics.split} loss {metrics.loss:.3f} (perplexity {metrics.perplexity:.4g}{own})"


def comparison(loss: float, baselines: Mapping[str, float]) -> str:
    """Return ``, below the byte bigram's 2.379`` for each baseline, or how far above, by unrounded numbers."""
    return "".join(
        f", {'below' if loss < value else f'{loss - value:.3f} above'} the {name}'s {value:.3f}"
        for name, value in baselines.items()
    )


def amount(value: float) -> str:
    """Return ``950``, ``12.3k`` or ``4.5M``: three digits are enough for a rate."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin console of kind observer."""
    return PluginInfo("observer", "console", options=ConsoleOptions)


@hookimpl
def megatron_run_create_observer(options: ConsoleOptions) -> Observer:
    """Make the observer for this process's standard output."""
    return ConsoleObserver(options)
