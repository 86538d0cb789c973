"""A plugin handed in as an object: an observer that keeps the losses, ready for a plot."""

from megatron_run import load_config
from megatron_run.contracts import Observer, StepMetrics
from megatron_run_engine import train


class Losses(Observer):
    def __init__(self) -> None:
        self.values: list[float | None] = []

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.values.append(metrics.loss)


losses = Losses()
train(load_config("preset:tiny", sets={"observer.use": "console"}, plugins=[losses]))
print(f"{len(losses.values)} losses, the last {losses.values[-1]}")
