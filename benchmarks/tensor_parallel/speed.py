"""Time and traffic of every side, on the same weights and tokens, in turns.

All sides run in one process group of two gloo ranks with one thread each: one after the other, and again, with glibc
keeping what is freed. Their losses and gradients are compared before anything is timed. The optimizer is left out
everywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from benchmarks.support.compare import compare
from benchmarks.support.goals import Goal, apart_text, goal_table
from benchmarks.support.megatron import NAME as MEGATRON
from benchmarks.support.megatron import installed
from benchmarks.support.quiet import ratio, timed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from benchmarks.support.shape import Shape
from benchmarks.tensor_parallel import ours
from benchmarks.tensor_parallel.model import SHAPES, Batch, Side
from benchmarks.tensor_parallel.peers.dtensor import NAME as DTENSOR
from benchmarks.tensor_parallel.peers.dtensor import DTensorStep
from benchmarks.tensor_parallel.peers.megatron import MegatronStep
from benchmarks.tensor_parallel.traffic import count, formula

RANKS = 2
#: Rounds whose time is discarded, besides the steps that are compared and counted.
WARM_UP = 1
#: The gradient of a key's bias is zero but for rounding; what has a smaller largest value is measured against this.
LEAST = 1e-5
ONE_RANK, TENSOR = "dense, one rank", "tensor"
#: Our layers: how they are split.
OURS: Mapping[str, Mapping[str, bool]] = {
    TENSOR: {},
    "tensor, overlap=false": {"overlap": False},
    "tensor, sequence": {"sequence": True},
    "tensor, sequence, overlap=false": {"sequence": True, "overlap": False},
}
GOALS = (
    Goal(TENSOR, ONE_RANK, "at least", 1.55),
    Goal(TENSOR, DTENSOR, "at most", 0.88),
    Goal(TENSOR, MEGATRON, "at most", 1.00),
)


def make_sides(shape: Shape) -> dict[str, Side]:
    """Every side, with the weights that ours start from. Collective."""
    batch, ranks = Batch(shape), ours.Ranks()
    one = ours.dense(shape, batch)
    sides: dict[str, Side] = {ONE_RANK: one}
    sides |= {name: ours.split(shape, batch, ranks, **how) for name, how in OURS.items()}
    sides[DTENSOR] = DTensorStep(shape, batch, one.weights)
    if installed():
        sides[MEGATRON] = MegatronStep(shape, batch, one.weights)
    return sides


def measure(shape: str, samples: int) -> dict[str, Any]:
    """How far each side's results lie from one rank's, the bytes it sends, and ``samples`` rounds of all sides."""
    sides = make_sides(SHAPES[shape])
    sent, results = {}, {}
    for name, side in sides.items():
        side.clear()
        sent[name] = count(side.step, side.ranks)
        results[name] = side.results()
    apart = {name: compare(found, results[ONE_RANK], least=LEAST) for name, found in results.items()}
    rounds = [_in_turn(sides) for _ in range(WARM_UP + samples)][WARM_UP:]
    return {"apart": apart, "sent": sent, "samples": rounds}


def _in_turn(sides: Mapping[str, Side]) -> dict[str, float]:
    """One timed step of each side: ``<side> seconds``, ``<side> foreign`` and the like."""
    found: dict[str, float] = {}
    for name, side in sides.items():
        side.clear()
        busy = dist.get_rank() < side.ranks
        found |= timed(name, side.step if busy else _rest)
    return found


def _rest() -> None:
    """The other rank's work while one computes alone: it waits in a barrier, which needs no core."""


def report(*, quick: bool) -> Iterator[str]:
    """Measure every side, and tell what was found."""
    found = on_ranks(measure, RANKS, {"shape": "small", "samples": 11 if quick else 41}, keeping=True)
    yield "\n## Time of a forward and backward\n"
    shape = SHAPES["small"]
    yield f"{shape}, fp32, dropout 0, untied, {RANKS} ranks of one thread. Peers begin a step without gradients.\n"
    yield from time_table(found)
    if MEGATRON not in found["sent"]:
        yield "\nmegatron-core is not installed here, and left out."
    yield "\n## Goals\n"
    yield from goal_table(TENSOR, (goal for goal in GOALS if goal.other in found["sent"]), found["samples"])
    yield "\n## Bytes that a rank sends in a step\n"
    yield from traffic_table(found, shape)


def time_table(found: Mapping[str, Any]) -> Iterator[str]:
    """A row a side: its median, and the medians of the ratios to one rank and to ours of the same rounds."""
    columns = ("layers", "step, s", "speed-up over one rank", "gradients apart", "samples used")
    yield from table(columns, (_time_row(found, name) for name in found["sent"]))


def _time_row(found: Mapping[str, Any], name: str) -> tuple[str, ...]:
    kept, speed_up = ratio(found["samples"], ONE_RANK, name)
    seconds = statistics.median(sample[f"{name} seconds"] for sample in kept.samples)
    return name, f"{seconds:.3f}", f"{speed_up:.3f}", apart_text(found, name), str(kept)


def traffic_table(found: Mapping[str, Any], shape: Shape) -> Iterator[str]:
    """A row a side that communicates: what was counted, and the formula for layers split as ours are."""
    yield from table(("layers", "counted, MB", "formula, MB"), (_row(found, shape, name) for name in found["sent"]))


def _row(found: Mapping[str, Any], shape: Shape, name: str) -> tuple[str, ...]:
    expected = 0.0 if name == ONE_RANK else formula(shape, RANKS, **OURS.get(name, {}))
    return name, f"{found['sent'][name] / 1e6:.3f}", f"{expected / 1e6:.3f}"
