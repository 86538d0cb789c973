"""The cost of the host: launches and idle moments of a step, the stall of a save, the time to the first step."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measuring import Day, alone, in_turn
from benchmarks.gpu.models import OURS, our_side, shape_of

#: Steps from one save to the next; the last ``QUIET`` before a save show how long a step takes beside which none runs.
INTERVAL, QUIET, SAVES = 10, 4, 3
#: A save that copies the state and writes it behind the training.
BEHIND = "behind the training"


def profile(day: Day) -> Iterator[dict[str, Any]]:
    """The piece: a profiled step of a small and of a large model, and of tiny layers from graphs of each kind."""
    steps = [("124m", OURS), ("1.3b", OURS), *(("small", name) for name in ("eager", "partial", "whole step"))]
    cases = {size if name == OURS else f"{size}, {name}": {"size": size, "name": name} for size, name in steps}
    record: dict[str, Any] = {}
    for name, found in in_turn(profile_step, day, cases):
        record[name] = found
        yield record


def profile_step(device: str, size: str, name: str, *, quick: bool) -> dict[str, Any]:
    """Launches, the share of the step in which the device computes, and the three operations that cost most."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    side = our_side(device, size, name, shape_of(size, quick=quick))
    assert not isinstance(side, str)
    for _ in range(4):
        side.step([])
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profiled(activities=activities) as trace:
        start = time.perf_counter()
        side.step([])
        wall = time.perf_counter() - start
    side.close()
    averages = trace.key_averages()
    cost = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    dearest = sorted(averages, key=lambda each: float(getattr(each, cost)), reverse=True)[:3]
    busy = sum(float(getattr(each, cost)) for each in averages) / 1e6
    launches = [each.count for each in averages if "LaunchKernel" in each.key or "GraphLaunch" in each.key]
    return {
        "seconds": wall,
        "launches": sum(launches) if device == "cuda" else sum(each.count for each in averages),
        "device busy": busy / wall,
        "first costs": {each.key: float(getattr(each, cost)) / 1e6 / wall for each in dearest},
    }


def saves(day: Day) -> Iterator[dict[str, Any]]:
    """The piece: steps lost to a save, at once and behind the training."""
    ways = {"at once": False, BEHIND: True}
    record: dict[str, Any] = {}
    for way, behind in ways.items():  # a process each: what a save leaves to its threads is not the other's
        record[way] = alone(stall, day, behind=behind)
        yield record


def stall(device: str, behind: bool, *, quick: bool) -> dict[str, Any]:  # passed as JSON
    """Milliseconds of a step, and of what a save adds to the steps that follow it."""
    from benchmarks.checkpoint.stall import Clock
    from megatron_run import load_config
    from megatron_run_engine.launch import train

    clock, shape = Clock(), shape_of("350m", quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {
            "run": {"device": device, "folder": folder + "/run"},
            "model": {
                "num_layers": shape.layers,
                "hidden_size": shape.hidden,
                "num_heads": shape.heads,
                "dropout": 0.0,
            },
            "train": {
                "steps": INTERVAL * SAVES + INTERVAL,
                "sequence_length": shape.sequence,
                "micro_batch_size": shape.micro_batch,
                "global_batch_size": shape.micro_batch,
                "precision": "bf16",
            },
            "data": {"use": "mock", "vocab_size": shape.vocab},
            "eval": {"interval": 0},
            "checkpoint": {"interval": INTERVAL, "async_save": behind, "keep": 1},
            "observer": {"use": []},
        }
        train(load_config(config, plugins=[clock]))
    steps = [after - before for before, after in pairwise(clock.ends)]
    # steps[i] lies between steps i + 1 and i + 2: those after steps INTERVAL, 2 x INTERVAL, ... hold a save
    lost, usual = [], []
    for save in range(INTERVAL - 1, len(steps) - QUIET, INTERVAL):
        typical = statistics.median(steps[save - QUIET : save])
        usual.append(typical)
        lost.append(sum(each - typical for each in steps[save : save + INTERVAL - QUIET]))
    return {"step ms": 1e3 * statistics.median(usual), "lost ms": 1e3 * statistics.median(lost), "saves": len(lost)}


def start(day: Day) -> Iterator[dict[str, Any]]:
    """The piece: seconds from the command to the end of the first step, with one rank."""
    found = []
    for _ in range(1 if day.quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            words = ("preset:tiny", "--set", f"run.device={day.device}", "--set", f"run.folder={folder}/run")
            more = ("--set", "train.steps=2", "--set", "observer.use=jsonl")
            begun = time.time()
            done = subprocess.run(
                (sys.executable, "-m", "megatron_run_cli", *words, *more), capture_output=True, text=True, check=False
            )
            if done.returncode:
                yield {"failed": done.stderr.strip().splitlines()[-1]}
                return
            first = Path(folder, "run", "metrics.jsonl").read_text("utf-8").splitlines()[0]
            found.append(float(json.loads(first)["time"]) - begun)
        yield {"seconds to the first step": statistics.median(found), "torch": torch.__version__}
