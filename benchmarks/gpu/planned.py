"""``plan calibrate --device cuda`` on this machine, and what the planner then says of the sizes that are measured."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.measuring import Day
from benchmarks.gpu.models import GPT
from benchmarks.single.ours import configuration
from benchmarks.support.shape import Shape
from megatron_run.config.request import Request
from megatron_run_planner.accuracy.anchors import Anchor
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.memory import stage_memory
from megatron_run_planner.step_time import step_time


def measure(day: Day) -> Iterator[dict[str, Any]]:
    """The piece: seconds of the calibration; tokens a second and GiB of each size, planned for what it found.

    Without a GPU the device that is planned for is one whose description the planner has.
    """
    record: dict[str, Any] = {}
    device = read_device("h200")
    if day.device == "cuda":
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "here.yaml")
            words = ("plan", "calibrate", "--device", "cuda", "--output", str(file))
            done = subprocess.run(
                (sys.executable, "-m", "megatron_run_cli", *words), capture_output=True, text=True, check=False
            )
            if done.returncode:
                yield {"failed": done.stderr.strip().splitlines()[-1]}
                return
            device = read_device(str(file))
        record |= {"seconds of the calibration": time.monotonic() - begun, "told": done.stdout.splitlines()[-5:-1]}
    for size, shape in GPT.items():
        record[size] = planned(shape, device)
        print(f"  {size}: {record[size]}", flush=True)
        yield record


def planned(shape: Shape, device: Device) -> dict[str, float]:
    """Of our eager training in bf16, as :mod:`benchmarks.gpu.models` measures it."""
    request = Request((configuration(shape, "bf16"),))
    step = Anchor.read({"request": request.to_json(), "ranks": 1, "seconds": 1.0})
    seconds = step_time(step.task.model, step.task.split, device, step.plan).seconds
    (memory,) = stage_memory(step.task.model, step.task.split, step.plan)
    tokens = shape.microbatches * shape.micro_batch * shape.sequence
    return {"tokens/s": tokens / seconds, "GiB": memory.total / 2**30}
