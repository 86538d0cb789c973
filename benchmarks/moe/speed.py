"""Time of every side, forward and backward, on the same weights and tokens, in turns.

All sides live in one process with two threads, under the allocator's settings that this project's launcher makes, and
several such processes are measured. Outputs and gradients are compared before anything is timed, but for those of
Hugging Face in bf16: its router computes in bf16 too, and some tokens choose another expert. A dense layer of as many
products shows what could be reached at most: it routes nothing. Each round takes one step of every side, in an order of
its own, so that nobody always follows the same neighbour.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.moe.model import SHAPES, Precision, Shape, Side
from benchmarks.moe.ours import OurLayer
from benchmarks.moe.peers.dense import NAME as DENSE
from benchmarks.moe.peers.dense import DenseLayer
from benchmarks.moe.peers.huggingface import WAYS, Mixtral, installed, name_of
from benchmarks.moe.peers.naive import NAME as NAIVE
from benchmarks.moe.peers.naive import NaiveLoop
from benchmarks.support.compare import compare
from benchmarks.support.goals import Goal, apart_text, goal_table
from benchmarks.support.quiet import ratio, timed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table

THREADS = 2
OURS = "megatron-run"
#: Of a precision: processes, and timed rounds in each after ``WARM_UP`` rounds whose time is discarded.
PROCESSES, SAMPLES, WARM_UP = 7, 9, 3
#: How far results may lie apart, relative to the largest value of a tensor: of 16-bit values, several roundings.
APART: Mapping[Precision, float] = {"fp32": 1e-4, "bf16": 0.1}
GOAL = Goal(OURS, NAIVE, "at least", 1.35)


def make_sides(shape: Shape, precision: Precision) -> dict[str, Side]:
    """Every side that can be made here, by name."""
    sides: dict[str, Side] = {OURS: OurLayer(shape, precision), NAIVE: NaiveLoop(shape, precision)}
    sides |= {name_of(way): Mixtral(shape, precision, way) for way in WAYS if installed()}
    return sides | {DENSE: DenseLayer(shape, precision)}


def measure(shape: str, precision: Precision, samples: int) -> dict[str, Any]:
    """How far each side's results lie from the naive ones, and ``samples`` rounds of all sides."""
    sides, results = make_sides(SHAPES[shape], precision), {}
    for name, side in sides.items():
        side.clear()
        side.step()
        results[name] = side.results()
    alike = [name for name in sides if name != DENSE and (precision == "fp32" or name in (OURS, NAIVE))]
    apart = {name: compare(results[name], results[NAIVE], APART[precision]) for name in alike}
    order = random.Random(1)
    rounds = [_round(sides, order) for _ in range(WARM_UP + samples)][WARM_UP:]
    return {"sides": list(sides), "apart": apart, "samples": rounds}


def _round(sides: Mapping[str, Side], order: random.Random) -> dict[str, float]:
    """One timed step of each side: ``<side> seconds``, ``<side> foreign`` and the like."""
    found: dict[str, float] = {}
    for name in order.sample(list(sides), len(sides)):
        sides[name].clear()
        found |= timed(name, sides[name].step)
    return found


def report(*, quick: bool) -> Iterator[str]:
    """Measure in both precisions, and tell what was found."""
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    found = {precision: _in_several_processes(precision, 2 if quick else PROCESSES) for precision in precisions}
    yield "\n## Forward and backward of one layer\n"
    yield f"{SHAPES['small']}, SwiGLU, no biases; {THREADS} threads. bf16 is 16-bit weights, whose gradients we add"
    yield "up in fp32 and the others in bf16. Peers begin a step without gradients.\n"
    yield from time_table(found)
    if not installed():
        yield "\ntransformers is not installed here, and its sides are left out."
    for precision in precisions:
        yield f"\n## Goal in {precision}\n"
        yield from goal_table(OURS, [GOAL], found[precision]["samples"])


def _in_several_processes(precision: Precision, processes: int) -> dict[str, Any]:
    """The measurements in all of them: where its memory lies moves a side by a fifth, as long as a process runs."""
    job = {"shape": "small", "precision": precision, "samples": SAMPLES}
    first, *others = (on_ranks(measure, 1, job, threads=THREADS, keeping=True) for _ in range(processes))
    return {**first, "samples": [sample for each in (first, *others) for sample in each["samples"]]}


def time_table(found: Mapping[Precision, Mapping[str, Any]]) -> Iterator[str]:
    """A row a side and precision: its median, and the median ratio of the naive loop's time to its own."""
    columns = ("side", "step, ms", "speed-up over the naive loop", "results apart", "samples used")
    rows = (_time_row(each, name, precision) for precision, each in found.items() for name in each["sides"])
    yield from table(columns, rows)


def _time_row(found: Mapping[str, Any], name: str, precision: Precision) -> tuple[str, ...]:
    kept, speed_up = ratio(found["samples"], NAIVE, name)
    milliseconds = 1e3 * statistics.median(sample[f"{name} seconds"] for sample in kept.samples)
    return f"{name}, {precision}", f"{milliseconds:.1f}", f"{speed_up:.2f}", apart_text(found, name), str(kept)
