"""Time of every side by length of sequence, on the same weights and tokens, in turns.

All sides run in one process group of two gloo ranks with one thread each: one after the other, and again. Losses and
gradients are compared before anything is timed. A step ends with the sum of the gradients that ranks have parts of; the
optimizer is left out everywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from benchmarks.context.ours import METHODS, Grids, Sample, dense, pieces, split, torch_ring
from benchmarks.context.peers.torch import NAME as TORCH
from benchmarks.context.peers.torch import PUBLIC, refusal
from benchmarks.support.compare import compare
from benchmarks.support.goals import Goal, apart_text, goal_table
from benchmarks.support.quiet import ratio, timed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from benchmarks.support.shape import Shape
from benchmarks.tensor_parallel.ours import OurStep

RANKS = 2
#: Rounds whose time is discarded, besides the steps that are compared.
WARM_UP = 1
#: A gradient that is zero but for rounding is measured against this.
LEAST = 1e-4
#: Small, so that attention decides: its share of the work grows with the length.
SHAPE = Shape(layers=1, hidden=128, heads=8, sequence=0, vocab=256, micro_batch=1, microbatches=1)
GROUPED = SHAPE.heads // 4
#: Lengths, and rounds of each: all, and with --quick.
LENGTHS = {1024: (41, 15), 4096: (21, 7), 16384: (9, 3)}
#: The length with grouped queries.
GROUPED_LENGTH = 4096
ONE_RANK, RING, SPLIT = "one rank, whole samples", "ring", "tensor, sequence"
GOALS = (Goal(RING, ONE_RANK, "at least", 1.80), Goal(RING, SPLIT, "at most", 1.00), Goal(RING, TORCH, "at most", 1.00))


def sides(sample: Sample) -> dict[str, Callable[[], OurStep]]:
    """Every side by name, to be made one after the other. Collective."""
    grids = Grids()
    found: dict[str, Callable[[], OurStep]] = {ONE_RANK: partial(dense, sample)}
    found |= {method: partial(pieces, sample, grids.context, method) for method in METHODS}
    found[SPLIT] = partial(split, sample, grids.tensor)
    if sample.kv_heads is None:
        found[TORCH] = partial(torch_ring, sample, grids.context)
    return found


def measure(length: int, samples: int, kv_heads: int | None = None) -> dict[str, Any]:
    """How far each side's results lie from one rank's, and ``samples`` rounds of all sides."""
    made = {name: make() for name, make in sides(Sample(replace(SHAPE, sequence=length), kv_heads)).items()}
    results = {}
    for name, side in made.items():
        side.clear()
        side.step()
        results[name] = side.results()
    apart = {name: compare(found, results[ONE_RANK], 1e-4, LEAST) for name, found in results.items()}
    rounds = [_in_turn(made) for _ in range(WARM_UP + samples)][WARM_UP:]
    return {"apart": apart, "samples": rounds, "refusal": refusal()}


def _in_turn(made: Mapping[str, OurStep]) -> dict[str, float]:
    """One timed step of each side; where one rank computes alone, the other waits in a barrier."""
    found: dict[str, float] = {}
    for name, side in made.items():
        side.clear()
        busy = dist.get_rank() < side.ranks
        found |= timed(name, side.step if busy else lambda: None)
    return found


def report(*, quick: bool) -> Iterator[str]:
    """Measure every length, and tell what was found."""
    yield "\n## Time of a forward and backward\n"
    yield f"{replace(SHAPE, sequence=max(LENGTHS))} and shorter, fp32, {RANKS} ranks of one thread.\n"
    found: dict[str, Any] = {}
    yield from table(COLUMNS, _rows(found, quick))
    yield f"\n{TORCH}: `_templated_ring_attention` in our layers. {PUBLIC} itself: `{_said(found)}`"
    for length in LENGTHS:
        yield f"\n## Goals at {length:,}\n"
        yield from goal_table(RING, GOALS, found[f"{length:,}"]["samples"])


COLUMNS = ("sequence", "side", "step, s", "speed-up over one rank", "gradients apart", "samples used")


def _rows(found: dict[str, Any], quick: bool) -> Iterator[tuple[str, ...]]:
    """The rows of every length, and of grouped queries, each as soon as it is measured."""
    jobs: list[tuple[str, dict[str, Any]]] = [
        (f"{length:,}", {"length": length, "samples": rounds[quick]}) for length, rounds in LENGTHS.items()
    ]
    grouped = {"length": GROUPED_LENGTH, "samples": LENGTHS[GROUPED_LENGTH][quick], "kv_heads": GROUPED}
    jobs.append((f"{GROUPED_LENGTH:,}, {GROUPED} key-value heads", grouped))
    for name, job in jobs:
        found[name] = on_ranks(measure, RANKS, job, keeping=True)
        yield from rows(name, found[name])


def rows(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row a side: its median, and the median of the ratios to one rank of the same rounds."""
    for side in found["apart"]:
        kept, speed_up = ratio(found["samples"], ONE_RANK, side)
        seconds = statistics.median(sample[f"{side} seconds"] for sample in kept.samples)
        yield name, side, f"{seconds:.3f}", f"{speed_up:.3f}", apart_text(found, side), str(kept)


def _said(found: Mapping[str, Any]) -> str:
    return next(iter(found.values()))["refusal"] or "runs here, and is not timed yet"
