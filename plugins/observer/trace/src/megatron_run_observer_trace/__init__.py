"""observer=trace: measured steps of the pipeline, each beside its plan, as files for Perfetto."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron_run.contracts import Observer, PluginInfo, RunSummary, StepTrace
from megatron_run.contracts.observer import read_steps, steps_of, steps_text
from megatron_run.errors import KEPT, InputError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.hookspecs import hookimpl
from megatron_run.pipeline.trace_events import trace_document, trace_events

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from megatron_run.contracts.observer import Timeline
    from megatron_run.contracts.schema import Config

#: Microseconds (the file's unit) per second (the unit of bars).
SECOND = 1e6


class Options(BaseModel):
    """The options in section ``observer``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Annotated[str | None, BeforeValidator(steps_text)] = Field(
        default=None, description="steps to trace: one, or first-last; unset: the attempt's tenth, or the last"
    )


def check_config(config: Config, options: Options) -> tuple[str, ...]:
    """No notices. Raises :class:`InputError` if the run ends before the first step of the options."""
    last = config.train.steps
    if options.steps and last and read_steps(options.steps).start > last:
        raise InputError(
            f"observer.trace.steps={options.steps}: the run ends with step {last} (train.steps)",
            fix=f"name steps of 1-{last}, or leave them out",
        )
    return ()


class Trace(Observer):
    """Writes ``trace/step-<step>.json`` in the run folder with two processes: the step as it ran, and as planned."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._run: RunSummary | None = None

    def on_train_start(self, run: RunSummary) -> None:
        """Remember the folder. Raises ValueError if this attempt runs none of the steps in the options."""
        self._run = run
        if self._options.steps and not self.traced_steps():
            left = f"the steps {run.first_step} to {run.steps}" if run.first_step <= run.steps else "no steps left"
            raise ValueError(f"steps={self._options.steps}: this attempt has {left}")

    def traced_steps(self) -> Collection[int]:
        """The steps of the options that this attempt runs; without options its tenth step, or its last."""
        if self._run is None:
            return ()
        return steps_of(self._options.steps, self._run)

    def on_trace(self, trace: StepTrace) -> None:
        """Write the file of this step. Raises OSError on failure."""
        if self._run is None:
            raise RuntimeError("it was not told of the start")
        write_new(trace_path(self._run, trace.step), json.dumps(step_document(trace), allow_nan=False))


def step_document(trace: StepTrace) -> dict[str, Any]:
    """The content of the file, in the form of ``schedule show --trace``, with the numbers under ``otherData``.

    ``otherData`` holds ``step``, ``clock_error_s`` as in :class:`StepTrace`, and for both ``ran`` and ``planned``
    ``makespan_s``, ``bubble_fraction`` and ``busy_s``, the seconds that each stage computed.
    """
    events = [
        event
        for process, (how, line) in enumerate((("as it ran", trace.ran), ("as planned", trace.planned)))
        for event in trace_events(
            line.stages, trace.layout, process=process, title=_title(trace.step, how, line), unit=SECOND
        )
    ]
    numbers = {"ran": _numbers(trace.ran), "planned": _numbers(trace.planned)}
    return {**trace_document(events), "otherData": {"step": trace.step, "clock_error_s": trace.clock_error, **numbers}}


def _title(step: int, how: str, line: Timeline) -> str:
    return f"step {step} {how}: {line.makespan * 1e3:.3g} ms, bubble {line.bubble_fraction:.1%}"


def _numbers(line: Timeline) -> dict[str, Any]:
    return {
        "makespan_s": line.makespan,
        "bubble_fraction": line.bubble_fraction,
        "busy_s": [sum(bar.end - bar.start for bar in bars) for bars in line.stages],
    }


def trace_path(run: RunSummary, step: int) -> Path:
    """``trace/step-5.json``; a later attempt that repeats the step writes ``step-5-attempt-2.json``."""
    again = f"-attempt-{run.attempt}" if run.attempt > 1 else ""
    plain, own = (run.folder / "trace" / f"step-{step}{suffix}.json" for suffix in ("", again))
    return own if plain.exists() else plain


def write_new(path: Path, text: str) -> None:
    """Write a file atomically. Raises FileExistsError instead of replacing one."""
    files = SafeFolder(path.parent.parent)
    files.make(path.parent.name)
    if path.exists():
        raise FileExistsError(f"{path} exists: {KEPT}")
    files.replace(f"{path.parent.name}/{path.name}", text.encode())


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin trace of kind observer."""
    return PluginInfo("observer", "trace", options=Options, check_config=check_config)


@hookimpl
def megatron_run_create_observer(options: Options) -> Observer:
    """Make the observer; it writes nothing before a step was timed."""
    return Trace(options)
