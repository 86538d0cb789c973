"""observer=wandb: losses, rates and the resolved run in Weights & Biases."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import EvalMetrics, Observer, PluginInfo, RunSummary, StepMetrics
from megatron_run.files.run_names import shown_name
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Options(BaseModel):
    """The options in section ``observer``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: str = Field(default="megatron-run", description="project in which the run is shown")
    entity: str | None = Field(default=None, description="user or team; unset: that of the key")
    name: str | None = Field(default=None, description="name of the run; unset: that of its folder")
    mode: Literal["auto", "online", "offline"] = Field(
        default="auto", description="auto: online with a key (`wandb login`), else offline, for `wandb sync`"
    )
    timeout_s: float = Field(default=30, gt=0, description="longest wait for the server, at the start and at the end")


class WeightsAndBiases(Observer):
    """Logs every step to one run of Weights & Biases, which later attempts continue.

    The library's own process does the sending. So a server that dies or hangs delays the training by at most
    ``timeout_s`` at its start and once more at its end.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._run: Any = None

    def on_train_start(self, run: RunSummary) -> None:
        """Open the run: online if asked and possible, else offline in ``wandb/`` of the run folder."""
        import wandb

        mode = self._options.mode
        if mode == "auto":
            mode = "online" if wandb.login(prompt=False, timeout=1) else "offline"
        try:
            self._run = self._open(run, mode)
        except wandb.errors.CommError:
            if mode == "offline":
                raise
            _say(f"the server of Weights & Biases did not answer within {self._options.timeout_s:g} s")
            wandb.teardown()  # its process still holds the run
            mode, self._run = "offline", self._open(run, "offline")
        # A resumed run repeats steps. The library's own counter never goes back; an axis of ours may.
        self._run.define_metric("*", step_metric="step")
        if mode == "offline":
            _say(f"Weights & Biases is offline; to send the run: wandb sync {_offline_folder(self._run)}")

    def _open(self, run: RunSummary, mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            init_timeout=self._options.timeout_s,
            finish_timeout=self._options.timeout_s,
            console="off",  # the run keeps its own logs
            disable_git=True,  # git would execute the hooks of the folder that the user is in
            disable_code=True,
            symlink=False,  # a run folder holds no links
            silent=True,
        )
        SafeFolder(run.folder).make("wandb")  # where it writes; raises OSError for a link that lies there
        leave, report = sys.exit, sys.excepthook
        try:
            return wandb.init(
                project=self._options.project,
                entity=self._options.entity,
                name=self._options.name or shown_name(run.folder),
                id=run.run_id,
                resume="allow",
                mode="online" if mode == "online" else "offline",
                dir=run.folder,
                config={
                    "config": run.config,
                    "plan": run.plan,
                    "world_size": run.world_size,
                    "parameters": run.parameters,
                },
                settings=settings,
            )
        finally:
            # The library replaces both to learn how the process ends; finish() tells it, and a run has its own.
            sys.exit, sys.excepthook = leave, report

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Log every finite number of the step."""
        self._log(metrics.step, metrics.curves())

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        """Log loss and perplexity."""
        self._log(metrics.step, metrics.curves())

    def on_sample(self, text: str) -> None:
        """Keep the text in the run's summary."""
        self._opened().summary["sample"] = text

    def on_error(self, error: BaseException) -> None:
        """Close the run as failed."""
        self._close(1)

    def on_train_end(self, reason: str) -> None:
        """Close the run; one that was stopped can be continued and is not failed."""
        self._close(0)

    def _log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._opened().log({"step": step, **numbers})

    def _opened(self) -> Any:
        if self._run is None:
            raise RuntimeError("its run is not open")
        return self._run

    def _close(self, exit_code: int) -> None:
        if self._run is not None:
            import wandb

            run, self._run = self._run, None
            run.finish(exit_code=exit_code)
            wandb.teardown()  # ends the library's process


def _offline_folder(run: Any) -> Path:
    from pathlib import Path

    return Path(run.dir).parent  # .../offline-run-DATE-ID/files


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin wandb of kind observer."""
    return PluginInfo("observer", "wandb", options=Options)


@hookimpl
def megatron_run_create_observer(options: Options) -> Observer:
    """Make the observer; wandb itself is imported when training starts."""
    return WeightsAndBiases(options)
