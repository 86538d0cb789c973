"""The survey of a machine: which shapes, which runs, on how many ranks.

Layers are measured inside real runs, as the difference between deep and shallow ones. A rank of several tensor ranks
computes what a layer with fewer heads and a narrower feed-forward half does, so one process measures those too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from megatron_run.config.request import Request
from megatron_run_engine.estimate.calibration.microbenchmarks import (
    time_attention,
    time_messages,
    time_products,
    time_sums,
    time_sweeps,
    time_together,
)
from megatron_run_engine.estimate.calibration.on_ranks import RankCall, on_ranks
from megatron_run_engine.estimate.calibration.timed_run import time_request
from megatron_run_engine.host.rank_environment import available_cores

#: (rows, columns, depth)
PRODUCTS = (
    (64, 512, 128), (64, 1024, 256), (128, 384, 128), (128, 768, 256), (128, 1024, 256), (128, 256, 1024),
    (256, 768, 256), (256, 1024, 256), (256, 256, 1024), (256, 2048, 512), (512, 512, 2048), (512, 1536, 512),
    (512, 8192, 256), (1024, 1024, 256), (1024, 2048, 512), (1024, 1024, 1024),
)  # fmt: skip
#: Bytes read and written.
SWEEPS = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
#: (micro batch, heads, sequence, head size)
ATTENTION = ((1, 4, 64, 32), (2, 4, 128, 64), (4, 8, 128, 64), (1, 4, 256, 64), (2, 8, 256, 64))
#: Bytes of what ranks sum or send.
MESSAGES = (2**6, 2**14, 2**18, 2**21)
#: Numbers of ranks that measure.
WORLDS = (1, 2, 4)


class Run(NamedTuple):
    """A small run in one process, which has the heads and the feed-forward half of one of ``tensor`` ranks."""

    hidden: int
    heads: int
    sequence: int
    micro_batch: int
    layers: int
    tensor: int = 1
    vocabulary: int = 1024
    microbatches: int = 2
    experts: int = 0

    def request(self) -> Request:
        """The run as a request."""
        sets = {
            "model.num_layers": self.layers,
            "model.hidden_size": self.hidden,
            "model.num_heads": self.heads // self.tensor,
            "model.head_size": self.hidden // self.heads,
            "model.ffn_size": 4 * self.hidden // self.tensor,
            "model.experts.count": self.experts,
            "train.sequence_length": self.sequence,
            "train.micro_batch_size": self.micro_batch,
            "train.global_batch_size": self.micro_batch * self.microbatches,
            "train.steps": 1000,
            "data.vocab_size": self.vocabulary,
            "eval.interval": 0,
            "run.threads": 1,
            "run.device": "cpu",
        }
        return Request(configs=("preset:tiny",), sets=tuple(f"{key}={value}" for key, value in sets.items()))


#: hidden, heads, sequence, micro batch, tensor. Large ones between these would cost seconds, and are predicted by them.
SHAPES = (
    (64, 4, 64, 1, 1), (64, 4, 128, 4, 1), (128, 4, 64, 1, 1), (128, 4, 128, 2, 1), (128, 4, 128, 4, 2),
    (128, 4, 256, 2, 1), (256, 4, 64, 2, 1), (256, 4, 128, 2, 2), (256, 4, 128, 2, 1), (256, 8, 256, 2, 1),
    (256, 8, 64, 2, 4), (384, 6, 128, 1, 1), (512, 8, 64, 1, 1), (512, 8, 128, 2, 1),
)  # fmt: skip
#: Layers of a shallow and of a deep run.
DEPTHS = (1, 3)
#: Steps of each training, and the first of them, which allocate and are not counted.
STEPS, FIRST = 4, 2
#: Seconds in which ranks compute the same at once: many turns of the scheduler.
TOGETHER = 0.3
#: Times that everything is measured: what disturbs a machine for some seconds hits one of them.
ROUNDS = 2


def runs() -> list[Run]:
    """Every run of a survey, a shallow one and the deep one after it; then larger vocabularies, batches and experts."""
    found = [Run(h, heads, s, b, layers, t) for h, heads, s, b, t in SHAPES for layers in DEPTHS]
    found += [Run(128, 4, 128, 2, 1, 1, vocabulary, 2) for vocabulary in (4096, 16384)]
    found.append(Run(128, 4, 64, 1, 1, 1, 1024, microbatches=8))
    found += [Run(h, 4, 128, 2, layers, 1, 1024, 2, experts) for h, experts in ((64, 4), (128, 8)) for layers in DEPTHS]
    return found


class Anchor(NamedTuple):
    """A training on several ranks, that settles what ranks cost each other: sizes of a run, and how it is split."""

    ranks: int
    hidden: int
    sequence: int
    plugins: Sequence[str]
    sets: Mapping[str, Any]

    def request(self) -> Request:
        """Four layers, and four microbatches on each of the data-parallel ranks."""
        micro_batch, microbatches = 128 // self.sequence, 4 * self.sets.get("parallel.data", 1)
        run = Run(self.hidden, self.hidden // 32, self.sequence, micro_batch, 4, microbatches=microbatches)
        keys = ("model.head_size", "model.ffn_size", "model.experts.count")
        sets = [each for each in run.request().sets if not each.startswith(keys)]
        return Request(
            configs=("preset:tiny",),
            sets=(*sets, *(f"{key}={value}" for key, value in self.sets.items())),
            plugins=tuple(self.plugins),
        )


_TENSOR, _STAGES = ("parallel-layer=tensor",), ("schedule=1f1b",)
#: Each way to split alone, and two at once; a large and a small model, since latencies tell in small ones.
ANCHORS = (
    Anchor(2, 256, 128, (), {"parallel.data": 2}),
    Anchor(2, 128, 64, (), {"parallel.data": 2}),
    Anchor(2, 256, 128, _TENSOR, {"parallel.tensor": 2}),
    Anchor(2, 128, 64, _TENSOR, {"parallel.tensor": 2}),
    Anchor(2, 256, 128, _STAGES, {"parallel.pipeline": 2}),
    Anchor(2, 128, 64, _STAGES, {"parallel.pipeline": 2}),
    Anchor(2, 256, 128, (), {"parallel.data": 2, "parallel.expert": 2, "model.experts.count": 4}),
    Anchor(2, 128, 64, (), {"parallel.data": 2, "parallel.expert": 2, "model.experts.count": 4}),
    Anchor(4, 256, 128, (), {"parallel.data": 4}),
    Anchor(4, 128, 64, (), {"parallel.data": 4}),
    Anchor(4, 256, 128, _TENSOR, {"parallel.tensor": 4}),
    Anchor(4, 256, 128, _TENSOR, {"parallel.tensor": 2, "parallel.data": 2}),
    Anchor(4, 256, 128, _STAGES, {"parallel.pipeline": 4}),
    Anchor(4, 128, 64, _STAGES, {"parallel.pipeline": 4}),
    Anchor(4, 256, 128, _STAGES, {"parallel.pipeline": 2, "parallel.data": 2}),
    Anchor(4, 128, 64, _STAGES, {"parallel.pipeline": 2, "parallel.data": 2}),
    Anchor(4, 128, 128, (*_TENSOR, *_STAGES), {"parallel.pipeline": 2, "parallel.tensor": 2}),
)


@dataclass
class Round:
    """Everything measured once. Of operators and exchanges seconds, of trainings those of each step and action."""

    operators: list[list[Any]] = field(default_factory=list)
    runs: list[Mapping[str, Any]] = field(default_factory=list)
    sums: list[tuple[int, int, int, float]] = field(default_factory=list)
    messages: list[tuple[int, int, float]] = field(default_factory=list)
    together: list[tuple[int, float]] = field(default_factory=list)
    anchors: list[list[float]] = field(default_factory=list)


def tasks() -> list[RankCall]:
    """Everything that a round measures, from one rank to the most; :func:`read_round` reads the results."""
    found = _operators()
    for world in WORLDS[1:]:
        found += [RankCall(world, time_sums, {"sizes": MESSAGES, "members": each}) for each in _members(world)]
        found.append(RankCall(world, time_messages, {"sizes": MESSAGES}))
        found += [RankCall(world, time_together, {"active": each, "seconds": TOGETHER}) for each in _active(world)]
        requests = [each.request().to_json() for each in ANCHORS if each.ranks == world]
        found += [RankCall(world, time_request, {"request": request, "steps": STEPS}) for request in requests]
    return found


def _operators() -> list[RankCall]:
    """Operators, and runs of one rank."""
    timed = [run.request().to_json() for run in runs()]
    return [
        RankCall(1, time_products, {"shapes": PRODUCTS, "dtype": "float32"}),
        RankCall(1, time_products, {"shapes": PRODUCTS[::4], "dtype": "bfloat16"}),
        RankCall(1, time_sweeps, {"sizes": SWEEPS}),
        RankCall(1, time_attention, {"shapes": ATTENTION}),
        *(RankCall(1, time_request, {"request": request, "steps": STEPS, "by_processor": True}) for request in timed),
    ]


def _members(world: int) -> list[int]:
    """How many of ``world`` ranks sum together."""
    return [each for each in WORLDS[1:] if each <= world]


def _active(world: int) -> list[int]:
    """How many of ``world`` ranks compute at once: all, and in the largest world the numbers that are no world."""
    return [each for each in range(1, world + 1) if each == world or (world == WORLDS[-1] and each not in WORLDS[1:])]


def read_round(results: Sequence[list[Any]]) -> Round:
    """Results of :func:`tasks` on each rank, as a round. What several ranks do takes as long as the slowest does."""
    rest, found = iter(results), Round()
    alone = [result for (result,) in islice(rest, len(_operators()))]
    count = len(alone) - len(runs())
    found.operators, found.runs = alone[:count], [spans(each) for each in alone[count:]]
    for world in WORLDS[1:]:
        for each in _members(world):
            found.sums += [(each, world, size, one) for size, one in zip(MESSAGES, slowest(next(rest)), strict=True)]
        found.messages += [(world, size, one) for size, one in zip(MESSAGES, slowest(next(rest)), strict=True)]
        found.together += [(each, max(next(rest))) for each in _active(world)]
        trials = islice(rest, sum(each.ranks == world for each in ANCHORS))
        found.anchors += [slowest([times["wall"] for times in ranks]) for ranks in trials]
    return found


def slowest(ranks: Iterable[Sequence[float]]) -> list[float]:
    """Seconds of each of several things that all ``ranks`` did, on the rank that took longest."""
    return [max(each) for each in zip(*ranks, strict=True)]


def survey(say: Callable[[str], None], rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure this machine ``rounds`` times. ``say`` is told what is being measured.

    The result has the fields of the planner's ``calibrate.Survey``.
    """
    once = tasks()
    ranks = [each.ranks for each in once]

    def begun(index: int) -> None:
        number, at = divmod(index, len(once))
        if at == 0 or ranks[at] > ranks[at - 1]:
            what = f"{ranks[at]} ranks that share the cores" if at else "operators, and runs of one rank"
            say(f"{what} ({number + 1} of {rounds})")

    found = on_ranks(once * rounds, begun)
    return surveyed([read_round(found[start : start + len(once)]) for start in range(0, len(found), len(once))])


def surveyed(rounds: Sequence[Round]) -> dict[str, Any]:
    """The rounds as one: of operators and exchanges the least, of steps and actions the typical ones of all rounds."""
    fp32, bf16, sweeps, attention = (
        _least([each.operators[index] for each in rounds]) for index in range(len(rounds[0].operators))
    )
    runs_found = [summary(each) for each in zip(*(each.runs for each in rounds), strict=True)]
    walls = zip(*(each.anchors for each in rounds), strict=True)
    return {
        "cores": available_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "products": [(*shape, seconds) for shape, seconds in zip(PRODUCTS, fp32, strict=True)],
        "half_products": [(*shape, seconds) for shape, seconds in zip(PRODUCTS[::4], bf16, strict=True)],
        "sweeps": list(zip(SWEEPS, sweeps, strict=True)),
        "attention": [(*shape, *both) for shape, both in zip(ATTENTION, attention, strict=True)],
        "runs": [{**run._asdict(), **found} for run, found in zip(runs(), runs_found, strict=True)],
        "sums": _least([each.sums for each in rounds]),
        "messages": _least([each.messages for each in rounds]),
        "together": sorted(_least([each.together for each in rounds])),
        "anchors": [
            {"request": anchor.request().to_json(), "ranks": anchor.ranks, "seconds": step_seconds(steps)}
            for anchor, steps in zip(ANCHORS, walls, strict=True)
        ],
    }


def _least(rounds: Sequence[Any]) -> Any:
    """The least of each number, place by place in lists that are alike."""
    if isinstance(rounds[0], list | tuple):
        return [_least(each) for each in zip(*rounds, strict=True)]
    return min(rounds)


def spans(times: Mapping[str, Any]) -> dict[str, list[float]]:
    """Processor seconds of each forward and backward, and of all else in each step, after the first ones."""
    found: dict[str, list[float]] = {"forward": [], "backward": [], "rest": []}
    for actions, whole in list(zip(times["actions"], times["processor"], strict=False))[FIRST:]:
        busy = 0.0
        for name, start, end in actions:
            found["forward" if name[0] == "F" else "backward"].append(end - start)
            busy += end - start
        found["rest"].append(whole - busy)
    return found


def summary(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Typical seconds of a microbatch's forward and backward, and of all else in a step, of the spans of all rounds."""
    return {key: typical([each for one in rounds for each in one[key]]) for key in rounds[0]}


def step_seconds(rounds: Sequence[Sequence[float]]) -> float:
    """Seconds of a step, from those of all steps of each round but the first ones."""
    return typical([each for steps in rounds for each in steps[FIRST:]])


def typical(values: Sequence[float]) -> float:
    """The lower decile, of fewer than ten the least: what disturbs only adds, and between rounds this differs least."""
    return sorted(values)[len(values) // 10]
