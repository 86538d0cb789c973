"""Time of a training step of every side, on the same tokens from the same weights, in turns.

All sides live in one process with two threads, under the allocator's settings that this project's launcher makes. Each
round takes one step of every side, in an order of its own, so that nobody always follows the same neighbour. The losses
of the first steps are compared before anything is timed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.single.model import SHAPES, Precision, Side, Weights
from benchmarks.single.sides import BARE, ERF, MEGATRON, NANOGPT, OPTIONAL, TANH, TRAINER, installed, keys, make_side
from benchmarks.support.goals import Goal, apart_text, goal_table
from benchmarks.support.quiet import ratio, timed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from benchmarks.support.shape import Shape

THREADS = 2
#: Steps whose losses are compared and whose time is discarded.
WARM_UP = 3
#: How far the losses of those steps may lie apart, relative to ours: of another GELU, and of 16-bit rounding, more.
APART: Mapping[Precision, float] = {"fp32": 1e-3, "bf16": 2e-2}


def label(name: str, precision: Precision) -> str:
    """The name of a side in samples and tables."""
    return f"{name}, {precision}"


FP32, BF16 = label(TRAINER, "fp32"), label(TRAINER, "bf16")
GOALS = (
    Goal(FP32, label(NANOGPT, "fp32"), "at least", 1.00),
    Goal(BF16, label(ERF, "bf16"), "at least", 1.20),
    Goal(BF16, label(MEGATRON, "bf16"), "at least", 1.35),
    Goal(FP32, label(BARE, "fp32"), "at most", 1.03),
    Goal(BF16, label(BARE, "bf16"), "at most", 1.03),
)


def measure(shape: str, samples: int) -> dict[str, Any]:
    """How far the losses lie apart, and ``samples`` rounds of all sides, by :func:`label`."""
    sides = _make_sides(SHAPES[shape])
    batches = sides[label(TRAINER, "fp32")]
    losses = [[side.step(batches.batch(step)) for side in sides.values()] for step in range(WARM_UP)]
    apart = _apart(list(sides), losses)
    order = random.Random(1)
    rounds = [_round(sides, batches.batch(WARM_UP + index), order) for index in range(samples)]
    for side in sides.values():
        side.close()
    return {"apart": apart, "samples": rounds}


def _make_sides(shape: Shape) -> dict[str, Any]:
    bare: Any = make_side(BARE, shape, "fp32")
    weights: Weights = bare.weights
    return {label(name, precision): make_side(name, shape, precision, weights) for name, precision in keys()}


def _apart(names: Sequence[str], losses: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far each side's losses lie from ours in its precision at most, relative. Raises ValueError beyond APART."""
    found = {}
    for index, name in enumerate(names):
        precision: Precision = "fp32" if name.endswith("fp32") else "bf16"
        reference = names.index(label(TRAINER, precision))
        found[name] = max(abs(step[index] / step[reference] - 1) for step in losses)
        if not found[name] <= APART[precision]:
            raise ValueError(f"{name}: losses lie {found[name]:.1e} apart from ours")
    return found


def _round(sides: Mapping[str, Side], batch: Any, order: random.Random) -> dict[str, float]:
    """One timed step of each side: ``<side> seconds``, ``<side> foreign`` and the like."""
    found: dict[str, float] = {}
    for name in order.sample(list(sides), len(sides)):
        found |= timed(name, partial(sides[name].step, batch))
    return found


def report(*, quick: bool) -> Iterator[str]:
    """Measure every side, and tell what was found."""
    job = {"shape": "small", "samples": 5 if quick else 21}
    found = on_ranks(measure, 1, job, threads=THREADS, keeping=True)
    yield "\n## Rate of a training step\n"
    yield f"{SHAPES['small']}, dropout 0, tied, AdamW in one kernel, clipping; {THREADS} threads, one process."
    yield "bf16 is 16-bit weights with fp32 masters and main gradients for us and megatron-core, and autocast for the"
    yield "others.\n"
    yield from rate_table(found)
    missing = sorted({what for name, what in OPTIONAL.items() if not installed(name)})
    if missing:
        yield f"\nNot installed here, and left out: {', '.join(missing)}."
    yield "\n## Goals\n"
    yield from goal_table("megatron-run", (goal for goal in GOALS if goal.other in found["apart"]), found["samples"])


def rate_table(found: Mapping[str, Any]) -> Iterator[str]:
    """A row a side: its rate relative to the slowest common choice, Hugging Face's as it comes, or nanoGPT's."""
    rows = list(found["apart"])
    base = next(one for one in (label(TANH, "fp32"), label(NANOGPT, "fp32")) if one in rows)
    yield from table(
        ("side", f"rate, relative to {base}", "losses apart", "samples used"),
        (_rate_row(found, name, base) for name in rows),
    )


def _rate_row(found: Mapping[str, Any], name: str, base: str) -> tuple[str, ...]:
    kept, rate = ratio(found["samples"], base, name)
    return name, f"{rate:.2f}", apart_text(found, name), str(kept)
