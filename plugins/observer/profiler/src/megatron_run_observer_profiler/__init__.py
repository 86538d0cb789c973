"""observer=profiler: torch's profiler over chosen steps of rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron_run.contracts import Observer, PluginInfo, RunSummary, StepMetrics
from megatron_run.contracts.observer import read_steps, steps_of, steps_text
from megatron_run.errors import InputError
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config
    from megatron_run_observer_profiler.window import Recording


class Options(BaseModel):
    """The options in section ``observer``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Annotated[str | None, BeforeValidator(steps_text)] = Field(
        default=None, description="steps to profile: one, or first-last; unset: the attempt's tenth, or its last"
    )
    memory: bool = Field(default=False, description="a snapshot of the GPU's allocator over these steps")
    stacks: bool = Field(default=False, description="the Python line of each operator; slower")
    nvtx: bool = Field(default=False, description="ranges for Nsight Systems in place of torch's own profile; GPU only")


def check_config(config: Config, options: Options) -> tuple[str, ...]:
    """No notices. Raises :class:`InputError` if the run ends before the first of the steps."""
    last = config.train.steps
    if options.steps and last and read_steps(options.steps).start > last:
        raise InputError(
            f"observer.profiler.steps={options.steps}: the run ends with step {last} (train.steps)",
            fix=f"name steps of 1-{last}, as in --plugin observer=profiler,steps={last}",
        )
    return ()


def check_device(device: str, options: Options) -> None:
    """Raises :class:`InputError` if ``device`` is no GPU and an option records one."""
    asked = [name for name in ("memory", "nvtx") if getattr(options, name)]
    if asked and not device.startswith("cuda"):
        raise InputError(
            f"observer.profiler.{asked[0]}=true: it records a GPU, and this rank runs on {device}",
            fix="leave the option out",
        )


class Profiler(Observer):
    """Writes operators, kernels and ranges of the chosen steps to ``profile/`` in the run folder.

    Every action of the pipeline is a range of its own, ``F0.1``, in the profile. Only rank 0 is recorded.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._steps = options, range(0)
        self._run: RunSummary | None = None
        self._window: Recording | None = None

    def on_train_start(self, run: RunSummary) -> None:
        """Start, if the first step of this attempt is profiled. Raises ValueError if none of its steps is."""
        self._run = run
        self._steps = steps_of(self._options.steps, run)
        if not self._steps and run.first_step <= run.steps:
            raise ValueError(f"steps={self._options.steps}: this attempt has the steps {run.first_step} to {run.steps}")
        self._start_before(run.first_step)

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Start before the first of the steps; write after the last. Raises OSError on failure."""
        if self._window is not None and metrics.step == self._steps[-1]:
            self._stop()
        elif self._window is not None:
            self._window.step_done()
        self._start_before(metrics.step + 1)

    def on_error(self, error: BaseException) -> None:
        """Stop, and keep what was recorded."""
        self._stop()

    def on_train_end(self, reason: str) -> None:
        """Stop, and keep what was recorded."""
        self._stop()

    def _start_before(self, step: int) -> None:
        if self._steps and step == self._steps[0] and self._window is None:
            from megatron_run_observer_profiler.window import Recording

            self._window = Recording(**self._options.model_dump(exclude={"steps"}))

    def _stop(self) -> None:
        if self._window is not None and self._run is not None:
            window, self._window = self._window, None
            window.close(self._run.folder / "profile", f"steps-{_text(self._steps)}-attempt-{self._run.attempt}")


def _text(steps: range) -> str:
    return f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else str(steps[0])


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin profiler of kind observer."""
    return PluginInfo("observer", "profiler", options=Options, check_config=check_config, check_device=check_device)


@hookimpl
def megatron_run_create_observer(options: Options) -> Observer:
    """Make the observer; torch is imported when the first of its steps starts."""
    return Profiler(options)
