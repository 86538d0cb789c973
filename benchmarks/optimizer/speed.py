"""Time of a step with every optimizer, on the same model, weights and tokens, in turns.

All sides run in one process group of two gloo ranks with one thread each: one after the other, and again, with glibc
keeping what is freed. Their losses and AdamW's first moments, which after a step are a tenth of the clipped gradients,
are compared before anything is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.optimizer import ours
from benchmarks.optimizer.memory import memory_table
from benchmarks.optimizer.model import CLIP, SHAPES, Batch, Side
from benchmarks.optimizer.peers import deepspeed
from benchmarks.optimizer.peers.torch import DdpSide, FsdpSide
from benchmarks.support.compare import compare
from benchmarks.support.goals import Goal, apart_text, goal_table
from benchmarks.support.quiet import kept_of, ratio, timed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from benchmarks.support.shape import Shape

RANKS = 2
ZERO1, AT_ONCE, ADAMW, SILENT = "zero1", "zero1, no overlap", "adamw", "zero1, silent"
ZERO3, ZERO3_HELD = "zero3", "zero3, all held for a step"
DDP, DDP_ZERO, DEEPSPEED = "DDP", "DDP + ZeroRedundancyOptimizer", "DeepSpeed ZeRO-1"
FSDP2, FSDP2_RESHARDING, DEEPSPEED3 = "FSDP2, all held for a step", "FSDP2", "DeepSpeed ZeRO-3"
#: What is timed besides steps: everything that a step sends, and what is done to send it.
SENDING, SENDING_NOTHING = "sending alone", "sending nothing"
GOALS = (Goal(ZERO1, DDP, "at most", 1.02), Goal(ZERO1, DEEPSPEED, "at most", 0.97))
#: Of what shards parameters too.
GOALS3 = (Goal(ZERO3, FSDP2_RESHARDING, "at most", 0.90), Goal(ZERO3, DEEPSPEED3, "at most", 0.90))
#: Sides may lie this far apart: torch's norm, by which they clip, sums a whole matrix in fp32.
TOLERANCE = 1e-3
#: The gradient of a key's bias is zero but for rounding; what has a smaller largest value is measured against this.
LEAST = 1e-6
#: Which sides hold all of the optimizer state; the others hold a share.
REPLICATED = (ADAMW, DDP)


#: Sides whose parameters are sharded, and those with which they are compared: all at once are too much memory.
SHARDED = (ZERO1, ZERO3, ZERO3_HELD, SILENT, DDP, FSDP2, FSDP2_RESHARDING, DEEPSPEED3)
WHOLE = (ZERO1, AT_ONCE, ADAMW, SILENT, DDP, DDP_ZERO, DEEPSPEED)
#: What is measured: a heading, a shape, samples with ``--quick`` and without, and sides; none: all.
CASES: tuple[tuple[str, str, int, int, tuple[str, ...]], ...] = (
    ("A step with much to compute", "small", 3, 11, ()),
    ("A step with much to send", "wide", 3, 21, WHOLE),
    ("A step with much to send, parameters sharded", "wide", 3, 21, SHARDED),
)


def make_sides(shape: Shape, names: Sequence[str] = ()) -> dict[str, Side]:
    """The sides ``names``, by default all. Collective."""
    batch, ranks = Batch(shape), ours.Ranks()
    makers: dict[str, Callable[..., Side]] = {
        ZERO1: ours.sharded,
        AT_ONCE: partial(ours.sharded, overlap=False),
        ZERO3: ours.lent,
        ZERO3_HELD: partial(ours.lent, once_a_step=True),
        ADAMW: ours.all_reduced,
        SILENT: ours.silent,
        DDP: DdpSide,
        DDP_ZERO: partial(DdpSide, zero=True),
        FSDP2: FsdpSide,
        FSDP2_RESHARDING: partial(FsdpSide, resharding=True),
    }
    if deepspeed.installed():
        makers |= {DEEPSPEED: deepspeed.DeepSpeedSide, DEEPSPEED3: partial(deepspeed.DeepSpeedSide, stage=3)}
    return {name: make(ranks, shape, batch) for name, make in makers.items() if not names or name in names}


def measure(shape: str, samples: int, names: Sequence[str] = ()) -> dict[str, Any]:
    """How far each side's results lie from zero1's, the state that it holds, and ``samples`` rounds of all sides.

    The two steps that are compared are the warm-up: torch arranges its buckets after the first.
    """
    sides = make_sides(SHAPES[shape], names)
    results = {name: _two_steps(side) for name, side in sides.items()}
    apart = {
        name: compare(found, results[ZERO1], TOLERANCE, LEAST) for name, found in results.items() if name != SILENT
    }
    results.clear()
    zero1, alone = sides[ZERO1], sides[SILENT]
    assert isinstance(zero1, ours.OurSide)
    assert isinstance(alone, ours.OurSide)
    calls: dict[str, Callable[[], object]] = {name: side.step for name, side in sides.items()}
    calls |= {SENDING: zero1.communicate, SENDING_NOTHING: alone.communicate}
    return {
        "apart": apart,
        "state": {name: side.state_bytes() for name, side in sides.items()},
        "parameters": zero1.values,
        "samples": [{k: v for each in calls.items() for k, v in timed(*each).items()} for _ in range(samples)],
    }


def _two_steps(side: Side) -> dict[str, Any]:
    side.step()
    found = {**side.first_moments(), "first losses": side.losses}
    side.step()
    return {**found, "second losses": side.losses}


def report(*, quick: bool) -> Iterator[str]:
    """Measure every side in every case, and tell what was found."""
    for title, shape, few, usual, names in CASES:
        arguments = {"shape": shape, "samples": few if quick else usual, "names": names}
        found = on_ranks(measure, RANKS, arguments, keeping=True)
        yield f"\n## {title}\n"
        yield f"{SHAPES[shape]}; {found['parameters'] / 1e6:.1f} million parameters, fp32, dropout 0, untied,"
        yield f"clipped to norm {CLIP:g}, {RANKS} ranks of one thread.\n"
        yield from time_table(found)
        if not deepspeed.installed():
            yield "\nDeepSpeed is not installed here, and left out."
        if names != SHARDED:
            yield "\n### Communication of zero1\n"
            yield from overlap_table(found)
        if shape == "small":
            yield "\n### Goals\n"
            yield from goal_table(ZERO1, (goal for goal in GOALS if goal.other in found["state"]), found["samples"])
        if ZERO3 in found["state"]:
            yield "\n### Goals of zero3\n"
            yield from goal_table(ZERO3, (goal for goal in GOALS3 if goal.other in found["state"]), found["samples"])
        if names == SHARDED:
            yield "\n### Memory of a rank\n"
            yield from memory_table(shape)
        yield "\n### Optimizer state of a rank\n"
        yield from state_table(found)


def time_table(found: Mapping[str, Any]) -> Iterator[str]:
    """A row a side: its median, the median of the ratios to DDP's of the same rounds, and of zero1's to it."""
    columns = ("optimizer", "step, s", "of DDP's", "zero1's of it", "processor time of DDP's", "apart", "samples used")
    yield from table(columns, (_time_row(found, name) for name in found["state"]))


def _time_row(found: Mapping[str, Any], name: str) -> tuple[str, ...]:
    kept, of_ddp = ratio(found["samples"], name, DDP)
    _, of_it = ratio(found["samples"], ZERO1, name)
    _, processor = ratio(found["samples"], name, DDP, "processor")
    seconds = statistics.median(sample[f"{name} seconds"] for sample in kept.samples)
    ratios = (f"{each:.3f}" for each in (of_ddp, of_it, processor))
    return name, f"{seconds:.3f}", *ratios, apart_text(found, name), str(kept)


def overlap_table(found: Mapping[str, Any]) -> Iterator[str]:
    """With overlap and without: how much longer a step is than one that sends nothing, and what is hidden so."""
    kept = kept_of(found["samples"], SILENT, SENDING, SENDING_NOTHING)
    sending = statistics.median(s[f"{SENDING} seconds"] - s[f"{SENDING_NOTHING} seconds"] for s in kept.samples)
    columns = ("", "added to a step that sends nothing, s", "hidden of the communication alone", "samples used")
    rows = [("communication alone", f"{sending:.3f}", "", str(kept))]
    for name in (ZERO1, AT_ONCE):
        both = kept_of(found["samples"], name, SILENT)
        added = statistics.median(s[f"{name} seconds"] - s[f"{SILENT} seconds"] for s in both.samples)
        rows.append((name, f"{added:.3f}", f"{1 - added / sending:.0%}", str(both)))
    yield from table(columns, rows)


def state_table(found: Mapping[str, Any]) -> Iterator[str]:
    """A row a side: 8 bytes a parameter, by the ranks where they share; beyond that are padding and counts of steps."""
    rows = ((name, *_state_row(found, name)) for name in found["state"])
    yield from table(("optimizer", "counted, bytes", "formula, bytes", "beyond it"), rows)


def _state_row(found: Mapping[str, Any], name: str) -> tuple[str, ...]:
    counted, formula = found["state"][name], 8 * found["parameters"] // (1 if name in REPLICATED else RANKS)
    return f"{counted}", f"{formula}", f"{counted - formula} ({(counted - formula) / formula:.2%})"
