"""Notes each new lowest validation loss in the run folder."""

from __future__ import annotations

from megatron_run.contracts import EvalMetrics, Observer, PluginInfo, RunSummary
from megatron_run.hookspecs import hookimpl


class Best(Observer):
    best = float("inf")

    def on_train_start(self, run: RunSummary) -> None:
        self._file = run.folder / "best.txt"

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        if metrics.loss < self.best:
            self.best = metrics.loss
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{metrics.loss} at step {metrics.step}\n")


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("observer", "best")


@hookimpl
def megatron_run_create_observer() -> Observer:
    return Best()
