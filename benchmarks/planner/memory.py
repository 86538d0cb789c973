"""The most bytes of tensors alive in whole steps of real runs, beside what a dry run counts without computing.

Measured is every storage that an operator made in a rank's process and that still exists, watched below autograd after
each operator: parameters, gradients, masters, state, activations, logits, buffers, temporaries. What kernels hold
inside themselves, and the allocator's rounding, are not in it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.planner.configuration import FULL, HALF, SPLIT, Configuration, sized, stages
from benchmarks.support.report import table
from megatron_run.config.request import Request
from megatron_run.planning import resolve
from megatron_run_engine.estimate.calibration.on_ranks import RankCall, on_ranks
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.estimate.step_memory import LiveBytes, step_memory
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.build import build
from megatron_run_engine.training.observers import Observers
from megatron_run_engine.training.trainer import Trainer

#: Steps whose peak counts: the first makes the optimizer's state, the second knows when gradients are complete.
STEPS = (2, 3)
BF16, DROPOUT = {"train.precision": "bf16"}, {"model.dropout": 0.1}
LLAMA = {"model.activation": "swiglu", "model.norm.kind": "rmsnorm", "model.position": "rope", "model.num_kv_heads": 2}
PIPE, GPIPE, ZERO = ("schedule=1f1b",), ("schedule=gpipe",), ("optimizer=zero1",)
_RUNS = (
    *(Configuration(1, (), more) for more in ({}, BF16, DROPOUT, FULL, HALF, BF16 | FULL, LLAMA, LLAMA | BF16 | HALF)),
    Configuration(1, (), {"train.recompute": "core_attn", **BF16, **DROPOUT}),
    Configuration(1, (), sized(256, 4, 128)),
    Configuration(1, (), sized(64, 4, 256, 4, 16) | BF16),
    Configuration(1, (), {"data.vocab_size": 8192}),
    Configuration(1, (), {"data.vocab_size": 8192, "model.loss_chunks": 4}),
    Configuration(1, (), {"model.tie_embeddings": "false", **BF16}),
    *(Configuration(2, PIPE, stages(2) | more) for more in ({}, BF16, FULL, HALF | DROPOUT, LLAMA)),
    *(Configuration(2, GPIPE, stages(2) | more) for more in ({}, FULL, BF16)),
    *(Configuration(2, ("schedule=interleaved",), stages(2, chunks=2) | more) for more in ({}, BF16)),
    *(Configuration(2, ("schedule=zero-bubble",), stages(2) | more) for more in ({}, BF16)),
    *(Configuration(2, (SPLIT,), {"parallel.tensor": 2} | more) for more in ({}, BF16, FULL, DROPOUT)),
    *(Configuration(2, (SPLIT,), {"parallel.tensor": 2, "parallel.sequence": "true"} | more) for more in ({}, BF16)),
    *(Configuration(2, ZERO, {"parallel.data": 2} | more) for more in ({}, BF16, FULL | BF16)),
    *(Configuration(2, (), {"parallel.data": 2} | more) for more in ({}, BF16)),
    Configuration(4, PIPE, stages(4)),
    Configuration(4, GPIPE, stages(4) | BF16),
    Configuration(4, ("schedule=zero-bubble",), stages(4)),
    Configuration(4, (SPLIT, *PIPE), stages(2, tensor=2)),
    Configuration(4, (SPLIT, *PIPE), stages(2, tensor=2) | BF16 | FULL),
    Configuration(4, PIPE, stages(2, data=2)),
    Configuration(4, (*PIPE, *ZERO), stages(2, data=2) | BF16),
    Configuration(4, ZERO, {"parallel.data": 4} | BF16),
    Configuration(4, (SPLIT,), {"parallel.tensor": 4}),
)
CONFIGURATIONS = tuple(replace(each, sequence=64) for each in _RUNS)


class Counted(NamedTuple):
    """A configuration: the largest error over its ranks, and planned and measured bytes of the rank that has it."""

    configuration: Configuration
    planned: int
    measured: int

    @property
    def error(self) -> float:
        """Planned over measured, less 1."""
        return self.planned / self.measured - 1


class _EnoughError(Exception):
    """The steps that count are over."""


class _Watched:
    """An executor at whose steps' beginnings the peak so far is noted, and starts anew."""

    def __init__(self, executor: Any, live: LiveBytes) -> None:
        self._executor, self._live = executor, live
        self.peaks: list[int] = []

    def run(self, program: Any, inputs: Any, clock: Any = None) -> Any:
        """One step."""
        if inputs.seed is not None:
            self.peaks.append(self._live.peak)
            self._live.peak = self._live.now
            if len(self.peaks) > STEPS[-1]:
                raise _EnoughError
        return self._executor.run(program, inputs, clock)


def live_bytes(request: str) -> int:
    """The most bytes alive on this rank in a step of ``request`` (JSON). Collective over the ranks that share it."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run = resolve(replace(Request.from_json(request), nproc=size))
    live = LiveBytes()
    with tempfile.TemporaryDirectory() as folder, live:
        assembly = build(run, World(rank, size, rank, size))
        watched = _Watched(assembly.executor, live)
        executor: Any = watched
        trainer = Trainer(run, replace(assembly, executor=executor), RunFolder(Path(folder), 1, rank), StopRequest())
        trainer.resume()
        try:
            trainer.train(Observers([], logging.getLogger(__name__)))
        except _EnoughError:
            return max(watched.peaks[first] for first in STEPS)
        finally:
            trainer.close()
    raise ValueError(f"the run ended before {STEPS[-1]} steps")


def planned_bytes(request: Request, *, gpu: bool = False) -> list[int]:
    """The bytes that a dry run counts for a rank of each stage; with ``gpu`` for a run that asks for GPUs."""
    others = tuple(each for each in request.sets if not each.startswith("run.device="))
    run = resolve(replace(request, sets=(*others, "run.device=cuda"))) if gpu else resolve(request)
    size, counted = model_size(run), step_memory(run)
    if counted is None:
        raise ValueError("its layers cannot be counted")
    return [sum(rank.memory.values()) + sum(roles.values()) for rank, roles in zip(size.stages, counted, strict=True)]


def count(configuration: Configuration, measured: Sequence[int]) -> Counted:
    """Compare the measured bytes of every rank with those of its stage."""
    planned = planned_bytes(configuration.request)
    per_stage = len(measured) // len(planned)
    pairs = [(planned[rank // per_stage], found) for rank, found in enumerate(measured)]
    return Counted(configuration, *max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1)))


def compare(chosen: Sequence[Configuration]) -> Iterator[Counted]:
    """Run and count each configuration."""
    tasks = [RankCall(each.ranks, live_bytes, {"request": each.request.to_json()}) for each in chosen]
    for configuration, measured in zip(chosen, on_ranks(tasks), strict=True):
        yield count(configuration, measured)


def report(*, quick: bool) -> Iterator[str]:
    """A line a configuration, then the summary."""
    found = list(compare(CONFIGURATIONS[::6] if quick else CONFIGURATIONS))
    errors = [abs(each.error) for each in found]
    rows = [
        (each.configuration.name, f"{each.measured / 2**20:.2f}", f"{each.planned / 2**20:.2f}", f"{each.error:+.2%}")
        for each in found
    ]
    yield ""
    yield (
        f"{len(found)} configurations: mean error {sum(errors) / len(errors):.2%}, worst {max(errors):.2%}, "
        f"{sum(error <= 0.02 for error in errors)} within 2%. The rank with the largest error of each:"
    )
    yield ""
    yield from table(("run", "measured MiB", "planned MiB", "error"), rows)
