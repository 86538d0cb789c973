"""A tiny run of ``preset:tiny`` inside a test, with everything at hand and every number within reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from megatron_run.contracts import CheckpointMetrics, EvalMetrics, Microbatch, Observer, ParamInfo, StepMetrics
from megatron_run.errors import ExitCode
from megatron_run.planning import load_config
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.build import build
from megatron_run_engine.training.observers import Observers
from megatron_run_engine.training.trainer import Trainer
from megatron_run_testing.build_contexts import logical_gradients


class Watch(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.evaluations: list[EvalMetrics] = []
        self.texts: list[str] = []
        self.saved: list[int] = []
        self.after_step: Callable[[], object] = lambda: None

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        self.after_step()

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        self.evaluations.append(metrics)

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.saved.append(metrics.step)

    def on_sample(self, text: str) -> None:
        self.texts.append(text)


class Bench:
    """One rank of a tiny run, alone unless said otherwise. ``said`` is what it warned of.

    Alone it has a folder of its own in ``folder``, which is the run folder itself where the run is started ``again``.
    """

    def __init__(
        self, folder: Path, *sets: str, plugins: Iterable[str] = (), rank: int = 0, world: int = 1, again: bool = False
    ) -> None:
        self.run = load_config("preset:tiny", sets=("train.lr_warmup=0", *sets), plugins=tuple(plugins), nproc=world)
        self.assembly, self.stop, self.watch = build(self.run, World(rank, world)), StopRequest(), Watch()
        self.said: list[str] = []
        log = mock.Mock(warning=lambda text, *words: self.said.append(text % words))
        object.__setattr__(self.assembly.context, "log", log)
        self.folder = Path(mkdtemp(dir=folder)) if world == 1 and not again else folder
        self.trainer = Trainer(self.run, self.assembly, RunFolder(self.folder, 1, rank), self.stop)
        self.read: list[int] = []
        self._note_positions()

    def train(self) -> ExitCode:
        return self.trainer.train(Observers([("watch", self.watch)], mock.Mock()))

    @property
    def infos(self) -> dict[torch.nn.Parameter, ParamInfo]:
        return {parameter: info for infos in self.assembly.infos for parameter, info in infos.items()}

    def weights(self) -> torch.Tensor:
        parameters = [p for infos in self.assembly.infos for p in infos]
        return torch.cat([p.detach().flatten().clone() for p in parameters])

    def spoil(self, value: float, steps: set[int]) -> None:
        """Plant ``value`` into one gradient of these steps."""
        unscale, seen = self.assembly.optimizer.unscale_, SimpleNamespace(step=0)
        victim = next(iter(self.assembly.infos[0]))

        def spoiled(factor: torch.Tensor) -> torch.Tensor:
            seen.step += 1
            if seen.step in steps:
                main_grad(victim).view(-1)[3] = value
            return unscale(factor)

        cast("Any", self.assembly.optimizer).unscale_ = spoiled

    def spoil_losses(self, change: Callable[[int, int, torch.Tensor], torch.Tensor]) -> None:
        """Report ``change(how often a step was begun, microbatch, loss)`` where this rank reports a loss."""
        losses, seen = self.trainer._losses, SimpleNamespace(begun=0)
        start, report = losses.start_step, losses.report

        def start_step() -> None:
            seen.begun += 1
            start()

        def spoiled(microbatch: int, name: str, total: torch.Tensor, weight: torch.Tensor) -> None:
            report(microbatch, name, change(seen.begun, microbatch, total), weight)

        cast("Any", losses).start_step, cast("Any", losses).report = start_step, spoiled

    def _note_positions(self) -> None:
        """Keep in ``read`` where each step began in the stream of samples."""
        training = self.trainer._loader.training

        def watched(dataset: Any, step: int, consumed: int) -> Any:
            self.read.append(consumed)
            return training(dataset, step, consumed)

        cast("Any", self.trainer._loader).training = watched


def gradients_of_one_step(bench: Bench, shares: Sequence[float]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The unscaled gradients of the first step, and the fields of its microbatches; m counts ``shares[m]`` tokens."""
    stream = bench.trainer._loader.training

    def masked(*place: Any) -> Callable[[int], Microbatch]:
        load = stream(*place)

        def microbatch(index: int) -> Microbatch:
            loaded = load(index)
            drawn = torch.rand(loaded.fields["loss_mask"].shape, generator=torch.Generator().manual_seed(index))
            return replace(loaded, fields={**loaded.fields, "loss_mask": (drawn < shares[index]).float()})

        return microbatch

    cast("Any", bench.trainer._loader).training = masked
    microbatch = masked(bench.trainer._dataset, 1, 0)
    found: dict[str, torch.Tensor] = {}
    unscale = bench.assembly.optimizer.unscale_

    def watched(factor: torch.Tensor) -> torch.Tensor:
        overflow = unscale(factor)
        found.update(logical_gradients(bench.infos))
        return overflow

    cast("Any", bench.assembly.optimizer).unscale_ = watched
    bench.train()
    return found, [microbatch(index).fields for index in range(len(shares))]
