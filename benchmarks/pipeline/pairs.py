"""Step time of one schedule of ours against one of a peer, on the same chunks, in turns.

Both sides run in one process group of two gloo ranks with one thread each: ours, theirs, ours, and so on, with glibc
keeping what is freed. The gradients of both are compared before anything is timed. The optimizer is left out on both
sides, and torch does not return outputs, which is its faster setting.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.pipeline.model import SHAPES
from benchmarks.pipeline.schedules import BLOCKS, FOLD, LOOP, SCHEDULES, LayerCounts
from benchmarks.pipeline.sides import Side, Sides
from benchmarks.support.compare import compare
from benchmarks.support.megatron import NAME as MEGATRON
from benchmarks.support.megatron import installed
from benchmarks.support.quiet import take_sample, undisturbed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table

#: Steps of each side whose time is discarded, besides the one whose gradients are compared.
WARM_UP = 1


@dataclass(frozen=True)
class Pair:
    """A schedule of ours and a peer's on the split ``split``; ``fair`` says why, where that is not our schedule's."""

    schedule: str
    peer: str
    split: LayerCounts
    fair: str = ""

    @property
    def names(self) -> tuple[str, str, str, str]:
        """The table's names of the two sides, and the splits they run on."""
        return self.schedule, str(SCHEDULES[self.schedule].split), self.peer, str(self.split)


PAIRS = (
    Pair("gpipe", "ScheduleGPipe", BLOCKS),
    Pair("1f1b", "Schedule1F1B", BLOCKS),
    Pair("interleaved", "ScheduleInterleaved1F1B", LOOP),
    Pair("zb-h1", "ScheduleInterleavedZeroBubble", BLOCKS),
    Pair(
        "zb-h1",
        "ScheduleInterleavedZeroBubble",
        LOOP,
        "ZB-H1 has one chunk a stage; the peer is also run with two, which shorten its bubble",
    ),
    Pair(
        "zb-v",
        "ScheduleInterleavedZeroBubble",
        LOOP,
        "the peer's chunks can only go round in a loop. Both have two a stage, and the same work; that in the V one of "
        "three messages stays on its stage is a merit of ZB-V",
    ),
    Pair("zb-v", "ScheduleZBVZeroBubble", FOLD),
    *([Pair("1f1b", MEGATRON, BLOCKS)] if installed() else []),
)
COLUMNS = ("ours", "its split", "theirs", "its split", "ours, s", "theirs, s", "ratio", "ratio, processor time")


def measure_pairs(shape: str, samples: int, only: Sequence[int] = range(len(PAIRS))) -> list[dict[str, Any]]:
    """Per pair: the seconds of ``samples`` steps of each side, in turns, and how much else ran meanwhile."""
    sides, found = Sides(SHAPES[shape]), []
    for index in only:
        pair = PAIRS[index]
        own, peer = sides.own(pair.schedule), sides.peer(pair.peer, pair.split)
        apart = compare(own.results(), peer.results())
        taken = [_in_turn(own, peer) for _ in range(WARM_UP + samples)][WARM_UP:]
        found.append({"pair": index, "apart": apart, "samples": taken})
    return found


def _in_turn(own: Side, peer: Side) -> dict[str, float]:
    """One timed step of each side: ``ours_seconds``, ``theirs_seconds`` and the like."""
    both: dict[str, float] = {}
    for name, side in (("ours", own), ("theirs", peer)):
        side.stage.clear()
        both |= {f"{name}_{key}": value for key, value in asdict(take_sample(side.step)).items()}
    return both


def report(*, quick: bool) -> Iterator[str]:
    """Measure every pair, and tell what was found."""
    yield "\n## Step time, P 2, M 8\n"
    found = on_ranks(measure_pairs, 2, {"shape": "small", "samples": 3 if quick else 11}, keeping=True)
    yield from pair_table(found)
    yield "\nA split is the layers of each place in model order. In all of them the stage with the head computes two"
    yield "layers and the other four. Where the two sides' differ:\n"
    for pair in PAIRS:
        if pair.fair:
            yield f"- {pair.schedule}, {pair.peer} on {pair.split}: {pair.fair}."


def pair_table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row a pair: medians of both sides, and the median of the ratios of neighbouring samples."""
    yield from table((*COLUMNS, "gradients apart", "samples used"), map(_row, found))


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    kept = undisturbed(found["samples"])
    own, peer = (statistics.median(s[f"{side}_seconds"] for s in kept.samples) for side in ("ours", "theirs"))
    ratio, work = (
        statistics.median(s[f"ours_{what}"] / s[f"theirs_{what}"] for s in kept.samples)
        for what in ("seconds", "processor")
    )
    numbers = (f"{number:.3f}" for number in (own, peer, ratio, work))
    return *PAIRS[found["pair"]].names, *numbers, f"{found['apart']:.0e}" if found["apart"] else "equal", str(kept)
