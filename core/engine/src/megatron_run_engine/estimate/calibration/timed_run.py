"""Times the steps of a real run, and the actions in them, without a launcher around it.

The trainer is the one that trains; only the executor is wrapped, so that both clocks are read where a step begins and
around each action. A step lasts from one beginning to the next: batch, messages, gradients and update are in it.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_run.config.request import Request
from megatron_run.planning import resolve
from megatron_run_engine.host.process import chosen_kernels, set_threads
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.build import build
from megatron_run_engine.training.observers import Observers
from megatron_run_engine.training.trainer import Trainer

if TYPE_CHECKING:
    from megatron_run.pipeline.lower import Instruction
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.execute import Executor, StepInputs, StepRecord

#: (action, when it began, when it ended)
Timed = tuple[str, float, float]


@dataclass
class RunTimes:
    """The times of one rank: per step its length by the wall and in processor seconds, and its actions in order.

    Actions are timed by the wall, or by the processor where that was asked.
    """

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    actions: list[list[Timed]] = field(default_factory=list)


class _EnoughError(Exception):
    """The run has been timed: what follows its last step would only take time."""


class _TimedExecutor:
    """An executor that keeps when its steps begin, and its actions' times."""

    def __init__(self, executor: Executor, steps: int, clock: Callable[[], float]) -> None:
        self._executor, self._steps, self._clock = executor, steps, clock
        self.times = RunTimes()
        self._began: tuple[float, float] | None = None

    def run(
        self, program: Sequence[Instruction], inputs: StepInputs, clock: Callable[[], float] | None = None
    ) -> StepRecord:
        if inputs.seed is None:  # an evaluation, which is no step
            return self._executor.run(program, inputs, clock)
        now = time.perf_counter(), time.process_time()
        if self._began is not None:
            self.times.wall.append(now[0] - self._began[0])
            self.times.processor.append(now[1] - self._began[1])
        self._began = now
        if len(self.times.wall) == self._steps:
            raise _EnoughError
        record = self._executor.run(program, inputs, clock or self._clock)
        spans = zip(record.executed, record.times, strict=True)
        self.times.actions.append([(str(action), start, end) for action, (start, end) in spans])
        return record


def time_run(request: Request, world: World, folder: Path, steps: int, *, by_processor: bool = False) -> RunTimes:
    """Train ``request`` on this rank for ``steps`` steps and return their times. Collective over the world.

    The configuration must have more steps than that. Nothing is saved and nothing evaluated; ``folder`` is the run's.
    """
    run = resolve(replace(request, nproc=world.size))
    set_threads(run, world)
    with chosen_kernels(run.config.run.deterministic, world.device):
        return _time_run(run, world, folder, steps, time.process_time if by_processor else time.perf_counter)


def _time_run(run: ResolvedRun, world: World, folder: Path, steps: int, clock: Callable[[], float]) -> RunTimes:
    assembly = build(run, world)
    timed = _TimedExecutor(assembly.executor, steps, clock)
    trainer = Trainer(
        run, replace(assembly, executor=cast("Executor", timed)), RunFolder(folder, 1, world.rank), StopRequest()
    )
    trainer.resume()
    try:
        trainer.train(Observers([], logging.getLogger(__name__)))
    except _EnoughError:
        return timed.times
    finally:
        trainer.close()
    raise ValueError(f"the run ended before {steps} steps were timed")


def time_request(request: str, steps: int, *, by_processor: bool = False) -> dict[str, Any]:
    """:func:`time_run` of a request's JSON, on a rank that the environment names; the result as plain data."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        world = World(rank, size, rank, size)
        return asdict(time_run(Request.from_json(request), world, Path(folder), steps, by_processor=by_processor))
