"""Runs that are stopped and resumed inside a test: each attempt trains in this process and says what it saw."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode
from tests.support.training import train_in_process

#: A network of one layer on short sequences: a step takes some milliseconds.
SMALL: Mapping[str, Any] = {
    "model.num_layers": 1,
    "model.hidden_size": 16,
    "train.sequence_length": 8,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 4,
    "eval.batches": 1,
    "data.vocab_size": 32,
}
#: What of a step's numbers is learned and not measured.
COMPARED = ("step", "samples", "loss", "grad_norm", "lr", "loss_scale", "skipped", "skipped_total", "microbatches")


@dataclass
class Attempt:
    """What one attempt saw: its first step, the numbers of each step, the saved steps, and the code it ended with.

    ``times`` is what was said of each saved step, ``assembly`` what it trained with, as it was at the end, and
    ``failures`` for a test to fill.
    """

    first: int = 0
    numbers: dict[int, dict[str, Any]] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    code: ExitCode | None = None
    times: list[Any] = field(default_factory=list)
    assembly: Any = None
    failures: list[str] = field(default_factory=list)


def attempt(
    folder: Path,
    sets: Mapping[str, Any],
    plugins: tuple[str, ...] = (),
    *,
    stop_after: int | None = None,
    rank: int = 0,
    world: int = 1,
    number: int = 1,
    loaded: Callable[[Any], None] = lambda assembly: None,
    each_step: Callable[[int], None] = lambda step: None,
    **asked: Any,
) -> Attempt:
    """Train ``preset:tiny`` with these settings in the run folder ``folder``; ``asked`` are fields of the request.

    ``stop_after`` is the step after which rank 0 is asked to stop, as by SIGTERM. ``loaded`` is called with what the
    run is made of before its first step; ``each_step`` on rank 0 after each step, before it is saved, and a
    KeyboardInterrupt from it ends the run.
    """
    from megatron_run.contracts import CheckpointMetrics, Observer, StepMetrics
    from megatron_run_engine.runtime.world import StopRequest

    seen, stop = Attempt(), StopRequest()

    class Watch(Observer):
        def on_step_end(self, metrics: StepMetrics) -> None:
            seen.numbers[metrics.step] = {name: getattr(metrics, name) for name in COMPARED}
            if metrics.step + 1 == stop_after:
                stop.stop(ExitCode.SIGTERM)
            each_step(metrics.step)

        def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
            seen.saved.append(metrics.step)
            seen.times.append(metrics)

    def built(run: Any, assembly: Any) -> None:
        seen.assembly = assembly

    def started(first: int) -> list[Any]:
        seen.first = first
        loaded(seen.assembly)
        if rank == 0 and stop_after == first:
            stop.stop(ExitCode.SIGTERM)
        return [Watch()] if rank == 0 else []

    request = Request(("preset:tiny",), nproc=world, plugins=plugins, values=dict(sets), **asked)
    folder.mkdir(parents=True, exist_ok=True)
    seen.code = train_in_process(request, rank, world, folder, built=built, started=started, stop=stop, number=number)
    return seen


def only_step(source: Path, step: int, target: Path) -> Path:
    """A run folder at ``target`` in which nothing but ``step`` of the run at ``source`` was saved."""
    name = f"step{step}"
    shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)
    return target
