"""What is measured of a machine: which shapes, which runs, on how many ranks.

Layers are measured inside real runs, as the difference between deep and shallow ones. A rank of several tensor ranks
computes what a layer with fewer heads and a narrower feed-forward half does, so one process measures those too.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_run.config.request import Request
from megatron_run_engine.training.calibration.microbenchmarks import (
    time_attention,
    time_messages,
    time_products,
    time_sums,
    time_sweeps,
    time_together,
)
from megatron_run_engine.training.calibration.on_ranks import Task, on_ranks
from megatron_run_engine.training.calibration.timed_run import time_request
from megatron_run_engine.training.process import available_cores

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
MESSAGES = (2**6, 2**14, 2**17, 2**20, 2**23)
RANKS = (2, 4)


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
            "model.experts": self.experts,
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


#: hidden, heads, sequence, micro batch, tensor
SHAPES = (
    (64, 4, 64, 1, 1), (64, 4, 128, 4, 1), (128, 4, 64, 1, 1), (128, 4, 128, 2, 1), (128, 4, 128, 4, 2),
    (128, 4, 256, 2, 1), (256, 4, 64, 2, 1), (256, 4, 128, 2, 2), (256, 4, 128, 2, 1), (256, 8, 128, 4, 1),
    (256, 8, 256, 2, 1), (256, 8, 64, 2, 4), (384, 6, 128, 1, 1), (512, 8, 64, 1, 1), (512, 8, 128, 2, 1),
    (512, 8, 128, 2, 2),
)  # fmt: skip
#: Layers of a shallow and of a deep run.
DEPTHS = (1, 3)
STEPS = 7


def runs() -> list[Run]:
    """Every run of a survey, a shallow one and the deep one after it; then larger vocabularies, batches and experts."""
    found = [Run(h, heads, s, b, layers, t) for h, heads, s, b, t in SHAPES for layers in DEPTHS]
    found += [Run(128, 4, 128, 2, 1, 1, vocabulary, 2) for vocabulary in (4096, 16384)]
    found += [Run(128, 4, 64, 1, 1, 1, 1024, microbatches) for microbatches in (8,)]
    found += [Run(h, 4, 128, 2, layers, 1, 1024, 2, experts) for h, experts in ((64, 4), (128, 8)) for layers in DEPTHS]
    return found


#: Trainings on several ranks, and the constant that each settles.
ANCHORS: Sequence[tuple[str, int, Sequence[str], Mapping[str, Any]]] = (
    ("slowdown", 2, (), {"parallel.data": 2}),
    ("sum", 2, ("parallel-layer=tensor",), {"parallel.tensor": 2}),
    ("message", 2, ("schedule=1f1b",), {"parallel.pipeline": 2}),
    ("slowdown", 4, (), {"parallel.data": 4}),
    ("sum", 4, ("parallel-layer=tensor",), {"parallel.tensor": 4}),
    ("sum", 4, ("parallel-layer=tensor",), {"parallel.tensor": 2, "parallel.data": 2}),
    ("message", 4, ("schedule=1f1b",), {"parallel.pipeline": 4}),
)


def anchor_request(plugins: Sequence[str], parallel: Mapping[str, Any]) -> Request:
    """A training of four layers and six microbatches on each of its data-parallel ranks."""
    run = Run(256, 8, 128, 1, 4, microbatches=6 * parallel.get("parallel.data", 1))
    keys = ("model.head_size", "model.ffn_size")
    sets = [each for each in run.request().sets if not each.startswith(keys)]
    return Request(
        configs=("preset:tiny",),
        sets=(*sets, *(f"{key}={value}" for key, value in parallel.items())),
        plugins=tuple(plugins),
    )


def survey(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure this machine. ``say`` is told what is being measured.

    The result has the fields of the planner's ``calibrate.Survey``.
    """
    say("products, sweeps and attention")
    operators = [
        Task(time_products, {"shapes": PRODUCTS, "dtype": "float32"}),
        Task(time_products, {"shapes": PRODUCTS[::4], "dtype": "bfloat16"}),
        Task(time_sweeps, {"sizes": SWEEPS}),
        Task(time_attention, {"shapes": ATTENTION}),
    ]
    chosen = runs()
    arguments: list[Mapping[str, Any]] = [
        {"request": run.request().to_json(), "steps": STEPS, "by_processor": True} for run in chosen
    ]
    (fp32,), (bf16,), (sweeps,), (attention,), *timed = on_ranks(
        1, [*operators, *(Task(time_request, each) for each in arguments)]
    )
    sums, messages, together, anchors = [], [], [], []
    for world in RANKS:
        say(f"{world} ranks that share the cores")
        members = [each for each in RANKS if each <= world]
        tasks = [Task(time_sums, {"sizes": MESSAGES, "members": each}) for each in members]
        tasks += [Task(time_messages, {"sizes": MESSAGES})]
        active = [each for each in (1, 2, 3, 4) if each == world or (world == RANKS[-1] and each not in RANKS)]
        tasks += [Task(time_together, {"active": each, "seconds": 0.7}) for each in active]
        mine = [(name, anchor_request(plugins, sizes)) for name, ranks, plugins, sizes in ANCHORS if ranks == world]
        tasks += [Task(time_request, {"request": request.to_json(), "steps": STEPS}) for _, request in mine]
        found = on_ranks(world, tasks)
        for each in members:
            (seconds, *_) = found.pop(0)
            sums += [(each, world, size, one) for size, one in zip(MESSAGES, seconds, strict=True)]
        messages += [(world, size, one) for size, one in zip(MESSAGES, found.pop(0)[0], strict=True)]
        together += [(each, max(found.pop(0))) for each in active]
        anchors += [
            {"constant": name, "request": request.to_json(), "ranks": world, "seconds": step_seconds(times[0]["wall"])}
            for (name, request), times in zip(mine, found, strict=True)
        ]
    return {
        "cores": available_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "products": [(*shape, seconds) for shape, seconds in zip(PRODUCTS, fp32, strict=True)],
        "half_products": [(*shape, seconds) for shape, seconds in zip(PRODUCTS[::4], bf16, strict=True)],
        "sweeps": list(zip(SWEEPS, sweeps, strict=True)),
        "attention": [(*shape, *both) for shape, both in zip(ATTENTION, attention, strict=True)],
        "runs": [{**run._asdict(), **summary(one)} for run, (one,) in zip(chosen, timed, strict=True)],
        "sums": sums,
        "messages": messages,
        "together": sorted(together),
        "anchors": anchors,
    }


def summary(times: Mapping[str, Any]) -> dict[str, float]:
    """Processor seconds of a microbatch's forward and backward, and of all else in a step."""
    spans: dict[str, list[float]] = {"F": [], "B": []}
    rest = []
    for actions, whole in list(zip(times["actions"], times["processor"], strict=False))[2:]:
        busy = 0.0
        for name, start, end in actions:
            spans[name[0]].append(end - start)
            busy += end - start
        rest.append(whole - busy)
    return {"forward": _typical(spans["F"]), "backward": _typical(spans["B"]), "rest": _typical(rest)}


def processor_name() -> str:
    """The model of this machine's processor."""
    with suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def step_seconds(wall: Sequence[float]) -> float:
    """Seconds of a step, from those of all: without the first two, which allocate."""
    return _typical(wall[2:])


def _typical(values: Sequence[float]) -> float:
    """The median of the lower half: what disturbs only adds."""
    ordered = sorted(values)
    return median(ordered[: (len(ordered) + 1) // 2])
