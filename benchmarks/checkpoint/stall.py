"""For how many steps a training stands still when it saves: at once, and in the background.

The trainer saves every so many steps. Of the time from one step's end to the next one's what is above the median of
the last steps before a save, beside which nothing is written, is lost to the save: the copy, and what the writing takes
away from the steps meanwhile.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.support.gpt import train_section
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from benchmarks.support.shape import SMALL, TINY
from megatron_run import load_config
from megatron_run.contracts import CheckpointMetrics, Observer, StepMetrics
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.trainer import train_rank

#: By name: the tests have a smaller one. Short steps, so that what a save takes is seen.
SHAPES = {"small": replace(SMALL, microbatches=1), "tiny": TINY}
SHAPE = "small"
#: Steps from one save to the next, of which the first are the save's and the last show how long a step takes.
INTERVAL, QUIET = 10, 4
#: Steps that may be lost to a save in the background.
GOAL = 1.0
#: Ranks, and threads of each.
RANKS = ((1, 2), (2, 1))


class Clock(Observer):
    """When each step was done, and what was said of each save."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.saved: list[CheckpointMetrics] = []

    def on_step_end(self, metrics: StepMetrics) -> None:
        """A step is done, and not saved yet."""
        self.ends.append(time.perf_counter())

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """A step is on the disk."""
        self.saved.append(metrics)


def measure(folder: str, shape: str, saves: int, background: bool) -> dict[str, Any]:
    """The seconds of each step, with what comes after it, and of each save that was made on the way."""
    clock, rank, world = Clock(), dist.get_rank(), dist.get_world_size()
    sizes = SHAPES[shape]
    config = {
        "run": {"device": "cpu"},
        "model": {"num_layers": sizes.layers, "hidden_size": sizes.hidden, "num_heads": sizes.heads},
        "train": {**train_section(sizes, dist.get_world_size()), "steps": INTERVAL * (saves + 1), "lr_warmup": 0},
        "data": {"use": "mock", "vocab_size": sizes.vocab},
        "eval": {"interval": 0, "batches": 1},
        "checkpoint": {"interval": INTERVAL, "async_save": background},
        "optimizer": "zero1" if world > 1 else "adamw",
        "observer": {"use": []},
    }
    run = load_config(config, plugins=[clock], nproc=world)
    train_rank(run, World(rank, world), RunFolder(Path(folder), 1, rank), StopRequest())
    steps = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    return {
        "steps": steps,
        "saves": [[metrics.seconds, metrics.write_seconds, metrics.size] for metrics in clock.saved[:saves]],
    }


def lost_steps(steps: Sequence[float]) -> list[float]:
    """Of each save but the last, which ends the run: the time lost to it, in steps.

    ``steps[i]`` is the time from the end of step i + 1 to that of the next, so that a save of step INTERVAL begins in
    ``steps[INTERVAL - 1]``.
    """
    lost = []
    for first in range(INTERVAL - 1, len(steps) - INTERVAL + 1, INTERVAL):
        cycle = steps[first : first + INTERVAL]
        usual = statistics.median(cycle[-QUIET:])
        lost.append(sum(cycle) / usual - len(cycle))
    return lost


def report(*, quick: bool) -> Iterator[str]:
    """Measure both ways on every number of ranks."""
    yield "\n## What a save takes from the training\n"
    yield f"{SHAPES[SHAPE]}, a save every {INTERVAL} steps.\n"
    yield from table(
        ("ranks", "way", "step, s", "stood still, s", "on the disk after, s", "lost, steps", "goal", "met", "saves"),
        (row for ranks, threads in RANKS for row in _rows(ranks, threads, quick=quick)),
    )


def _rows(ranks: int, threads: int, *, quick: bool) -> Iterator[tuple[str, ...]]:
    for background in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            arguments = {"folder": folder, "shape": SHAPE, "saves": 2 if quick else 5, "background": background}
            yield row(ranks, on_ranks(measure, ranks, arguments, threads=threads, keeping=True), background=background)


def row(ranks: int, found: Mapping[str, Any], *, background: bool) -> tuple[str, ...]:
    """One way to save: medians over its saves."""
    lost = statistics.median(lost_steps(found["steps"]))
    still, written, size = (statistics.median(each) for each in zip(*found["saves"], strict=True))
    goal = (f"at most {GOAL:g}", "yes" if lost <= GOAL else "no") if background else ("", "")
    way = f"{'background' if background else 'at once'}, {size / 1e6:.0f} MB"
    step = statistics.median(found["steps"])
    return (
        str(ranks), way, f"{step:.2f}", f"{still:.2f}", f"{written:.2f}", f"{lost:.2f}", *goal, str(len(found["saves"]))
    )  # fmt: skip
