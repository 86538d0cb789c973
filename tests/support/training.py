"""Trains inside a test: every rank resolves the same request, trains, and returns what it saw."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_run.config.request import Request
from tests.support.ranks import run_ranks


@dataclass
class Seen:
    """What one rank saw: losses and gradient norms by step (rank 0), first gradients by name, actions, memory."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    executed: list[list[str]] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    planned_peak: int = 0


def train(world: int, *, sets: tuple[str, ...] = (), plugins: tuple[str, ...] = (), timeout: float = 90) -> list[Seen]:
    """Train ``preset:tiny`` with these settings on ``world`` ranks; one :class:`Seen` a rank."""
    request = Request(configs=("preset:tiny",), sets=sets, plugins=plugins, nproc=world)
    return run_ranks(train_here, world, request.to_json(), timeout=timeout)


def train_here(rank: int, world: int, request: str) -> Seen:
    """Train on this rank of a process group that exists already."""
    from megatron_run.contracts import EvalMetrics, Observer, StepMetrics
    from megatron_run.resolve import resolve
    from megatron_run.run_folder import RunFolder
    from megatron_run.trainer import train_rank
    from megatron_run.training.build import build
    from megatron_run.training.observing import Observers
    from megatron_run.world import StopRequest, World

    seen = Seen()

    class Watch(Observer):
        def on_step_end(self, metrics: StepMetrics) -> None:
            seen.losses.append(metrics.loss if metrics.loss is not None else float("nan"))
            seen.norms.append(metrics.grad_norm if metrics.grad_norm is not None else float("nan"))

        def on_eval_end(self, metrics: EvalMetrics) -> None:
            seen.validation.append(metrics.loss)

    def watched_build(*arguments: Any) -> Any:
        assembly = build(*arguments)
        plan = run.plans[max(run.plans)]
        seen.planned = [str(action) for action in plan.lists[assembly.context.topology.stage]]
        seen.planned_peak = plan.peak_in_flight[assembly.context.topology.stage]
        _record_actions(assembly, seen)
        _record_first_gradients(assembly, seen)
        return assembly

    run = resolve(Request.from_json(request))
    with tempfile.TemporaryDirectory() as folder, mock.patch("megatron_run.trainer.build", watched_build):
        observers = Observers([("watch", Watch())] if rank == 0 else [], mock.Mock())
        with mock.patch("megatron_run.trainer.start_observers", return_value=observers):
            train_rank(run, World(rank=rank, size=world), RunFolder(Path(folder), 1), StopRequest())
    return seen


def _record_actions(assembly: Any, seen: Seen) -> None:
    """Keep what the executor really ran in each training step."""
    execute = assembly.executor.run

    def run(program: Any, inputs: Any, clock: Any = None) -> Any:
        record = execute(program, inputs, clock)
        if inputs.seed is not None:
            seen.executed.append([str(action) for action in record.executed])
            seen.peaks.append(record.peak_in_flight)
        return record

    assembly.executor.run = run


def _record_first_gradients(assembly: Any, seen: Seen) -> None:
    """Keep the reduced gradients of the first step, by the logical tensors' names."""
    from megatron_run.gradients import main_grad

    unscale = assembly.optimizer.unscale_

    def record(factor: Any) -> Any:
        if not seen.gradients:
            for described in assembly.infos:
                for parameter, info in described.items():
                    for part in info.parts:
                        rows = main_grad(parameter)[part.local.start : part.local.stop]
                        seen.gradients[part.name] = rows.clone().numpy()
        return unscale(factor)

    assembly.optimizer.unscale_ = record
