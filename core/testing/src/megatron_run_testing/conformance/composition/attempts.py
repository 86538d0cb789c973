"""Trains compositions on ranks that live through many of them; what each run shows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run.config.request import Request
from megatron_run.contracts import EvalMetrics, Observer, StepMetrics
from megatron_run.errors import ExitCode, InputError
from megatron_run.planning import resolve
from megatron_run_testing.conformance.composition.axes import HALF

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Ranks that live, and seconds for which one waits for another.
WORLD, PATIENCE = 4, 60


@dataclass
class Outcome:
    """The numbers of a run: by step the loss, the gradient norm and the validation loss; and the final weights by name.

    ``fault`` says why there is nothing, or is empty; ``refused``: it is a choice that layers refuse.
    """

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    weights: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    fault: str = ""
    refused: bool = False


class Job(NamedTuple):
    """A run in the folder ``home``: its attempts, one after the other, on its ``width`` ranks from ``rank`` on."""

    home: str
    attempts: Sequence[Request]
    rank: int = 0

    @property
    def width(self) -> int:
        """The most ranks of an attempt."""
        return max(request.nproc or 1 for request in self.attempts)


def in_rounds(jobs: Sequence[Job]) -> list[list[Job]]:
    """``jobs`` side by side where they fit: those of a round have as many attempts, and ranks of their own."""
    rounds = list[list[Job]]()
    for job in sorted(jobs, key=lambda job: -job.width):
        for others in rounds:
            free = sum(other.width for other in others)
            if len(job.attempts) == len(others[0].attempts) and free + job.width <= WORLD:
                others.append(job._replace(rank=free))
                break
        else:
            rounds.append([job])
    return rounds


class _Watch(Observer):
    """Notes the numbers of a run, and asks it to stop after the step ``last``."""

    def __init__(self, outcome: Outcome, stop: Any, last: int | None) -> None:
        self._outcome, self._stop, self._last = outcome, stop, last

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._outcome.losses[metrics.step] = float("nan") if metrics.loss is None else metrics.loss
        self._outcome.norms[metrics.step] = float("nan") if metrics.grad_norm is None else metrics.grad_norm
        if metrics.step == self._last:
            self._stop.stop(ExitCode.SIGTERM)

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        self._outcome.validation[metrics.step] = metrics.loss


def work(rank: int, world: int, folder: str, rounds: Sequence[Sequence[Job]]) -> Iterator[Outcome | None]:
    """Do this rank's part of every round, and yield what the first rank of each run saw, None on the others."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()  # every attempt has a world of its own
    store = dist.FileStore(f"{folder}/meet", world)  # type: ignore[attr-defined]  # torch exports it without saying so
    meet = _Meeting(store, world)
    for jobs in rounds:
        own = next((job for job in jobs if job.rank <= rank < job.rank + job.width), None)
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):  # notices of hundreds of runs
            outcome = _run(own, rank, meet, len(jobs[0].attempts))
        yield outcome
    _join(f"{folder}/end", rank, world)  # what started the ranks leaves with all of them


class _Meeting:
    """All ranks wait for each other, those too that have no part in an attempt: else they would lose patience."""

    def __init__(self, store: Any, world: int) -> None:
        self._store, self._world, self._number = store, world, 0

    def __call__(self, home: str = "", fault: str = "") -> bool:
        """Wait for all; whether any rank has had a ``fault`` in the run in ``home``."""
        self._number += 1
        if fault:
            self._store.add(f"faults {home}", 1)
        if self._store.add(f"arrived {self._number}", 1) == self._world:
            self._store.set(f"all {self._number}", "")
        self._store.wait([f"all {self._number}"], timedelta(seconds=10 * PATIENCE))
        return bool(home and self._store.add(f"faults {home}", 0))


def _run(job: Job | None, rank: int, meet: _Meeting, attempts: int) -> Outcome | None:
    outcome, failed = Outcome(), meet()
    for number in range(1, attempts + 1):
        if job is None:
            meet()
            continue
        request, place = job.attempts[number - 1], rank - job.rank
        if place < (request.nproc or 1) and not failed:
            try:
                _attempt(job.home, request, place, number, outcome, HALF if number < attempts else None)
            except (Exception, SystemExit) as error:
                outcome.refused = isinstance(error, InputError)
                outcome.fault = f"attempt {number}, rank {place}: {type(error).__name__}: {error}"
        failed = meet(job.home, outcome.fault) or failed
    if job is None or rank != job.rank:
        return None
    if failed:
        outcome.fault = outcome.fault or "another rank failed"
    else:
        outcome.weights = _weights(Path(job.home))
    return outcome


def _attempt(home: str, request: Request, rank: int, number: int, outcome: Outcome, last: int | None) -> None:
    import torch.distributed as dist

    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.runtime.world import StopRequest, World
    from megatron_run_engine.training.trainer import train_rank

    size, stop = request.nproc or 1, StopRequest()
    run = resolve(request, [_Watch(outcome, stop, last)])
    folder = RunFolder(Path(home), number, rank)
    folder.logs.mkdir(parents=True, exist_ok=True)
    if size > 1:
        _join(f"{home}.{number}", rank, size)
    try:
        train_rank(run, World(rank, size), folder, stop)
    finally:
        if size > 1:
            dist.destroy_process_group()


def _join(store: str, rank: int, size: int) -> None:
    import torch.distributed as dist

    wait = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)


def _weights(home: Path) -> Mapping[str, NDArray[np.float32]]:
    """The weights of the newest step in the run folder ``home``, whole, by the names of logical tensors."""
    from megatron_run.contracts.optimizer import MASTER
    from megatron_run_engine.checkpoint.reader import Reader
    from megatron_run_engine.checkpoint.step_folder import find_step

    checkpoints, step = find_step(home)
    manifest = checkpoints.manifest(step)
    reader = Reader(checkpoints.folder(step), manifest)
    shapes = {name: fields[MASTER].shape for name, fields in manifest.tensors.items()}
    return {name: reader.read(name, MASTER, [0] * len(shape), shape).numpy() for name, shape in shapes.items()}
