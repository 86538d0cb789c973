"""observer=mlflow: losses, rates and the resolved run on an MLflow server, or in MLflow's own local store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import EvalMetrics, Observer, PluginInfo, RunSummary, StepMetrics
from megatron_run.errors import InputError
from megatron_run.files.run_names import shown_name
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config
    from megatron_run_observer_mlflow.sender import Sender


class Options(BaseModel):
    """The options in section ``observer``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str | None = Field(default=None, description="unset: MLFLOW_TRACKING_URI")
    experiment: str = Field(default="megatron-run", description="experiment in which the run is shown")
    name: str | None = Field(default=None, description="name of the run; unset: that of its folder")
    timeout_s: float = Field(default=30, gt=0, description="longest wait at the end for numbers not sent yet")


def check_config(_: Config, options: Options) -> tuple[str, ...]:
    """No notices. Raises :class:`InputError` without a server, and for a password, which the run would record."""
    if options.uri is not None and urlsplit(options.uri).password is not None:
        raise InputError(
            "observer.uri holds a password",
            why="a run records its configuration, where others read it",
            fix="leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )
    if options.uri is None and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise InputError(
            "observer=mlflow has no server", fix="name one: --plugin observer=mlflow,uri=URI, or MLFLOW_TRACKING_URI"
        )
    return ()


class MLflow(Observer):
    """Logs every step to one MLflow run, which later attempts continue.

    A thread does all the talking: MLflow's client repeats a failed request for minutes, and training must not wait.
    What the thread fails with is raised by the next event.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._sender: Sender | None = None

    def on_train_start(self, run: RunSummary) -> None:
        """Start the thread, which finds the run of an earlier attempt or makes one."""
        from megatron_run_observer_mlflow.sender import Sender

        self._sender = Sender(
            uri=self._options.uri,
            experiment=self._options.experiment,
            name=self._options.name or shown_name(run.folder),
            run_id=run.run_id,
            texts={"config.yaml": run.config, "plan.txt": run.plan},
            parameters={"world_size": run.world_size, "parameters": run.parameters, "steps": run.steps},
        )

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Log every finite number of the step."""
        self._started().log(metrics.curves(), metrics.step, metrics.time)

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        """Log loss and perplexity."""
        self._started().log(metrics.curves(), metrics.step)

    def on_sample(self, text: str) -> None:
        """Keep the text as an artifact of the run."""
        self._started().text("sample.txt", text)

    def on_error(self, error: BaseException) -> None:
        """Mark the run as failed."""
        self._end("FAILED")

    def on_train_end(self, reason: str) -> None:
        """Mark the run as finished, or as killed if it stopped early and can be continued."""
        self._end("FINISHED" if reason == "finished" else "KILLED")

    def _started(self) -> Sender:
        if self._sender is None:
            raise RuntimeError("its thread is not running")
        return self._sender

    def _end(self, status: str) -> None:
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.close(status, self._options.timeout_s)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin mlflow of kind observer."""
    return PluginInfo("observer", "mlflow", options=Options, check_config=check_config)


@hookimpl
def megatron_run_create_observer(options: Options) -> Observer:
    """Make the observer; mlflow itself is imported when training starts."""
    return MLflow(options)
