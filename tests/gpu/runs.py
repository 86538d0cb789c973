"""Runs on a device: what each test of this folder trains, and what it compares.

A test's twin on the CPU shows that the test itself is right; all but the quickest twins run at night.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_run import load_config
from megatron_run.config.request import Request
from megatron_run.contracts import Observer, StepMetrics
from megatron_run.errors import ExitCode
from megatron_run.planning import resolve
from megatron_run_engine.launch import train
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.trainer import train_rank

CPU = pytest.param("cpu", marks=pytest.mark.nightly)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
#: How far losses may lie from those of fp32 on a CPU, relative.
APART = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}


def steps(
    folder: Path, device: str, *sets: str, plugins: tuple[str, ...] = (), ranks: int = 1, backend: str = "auto"
) -> list[dict[str, Any]]:
    """What each step of a run of the toy preset reports; a folder that holds steps already is resumed."""
    fixed = (f"run.folder={folder}", f"run.device={device}", f"run.backend={backend}", "run.threads=1")
    toy = ("train.steps=6", "train.lr_shape=constant", "eval.interval=0", "observer.use=jsonl", "run.timeout=90")
    chosen = {each.partition("=")[0]: each for each in (*fixed, *toy, *sets)}  # the last one counts
    request = Request(("preset:tiny",), sets=tuple(chosen.values()), plugins=plugins, nproc=ranks)
    assert train(resolve(request)).code is ExitCode.DONE
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class _Watch(Observer):
    """Keeps the losses; asks to stop after a step, which ranks agree on in the next one."""

    def __init__(self, stop: StopRequest, stop_after: int | None) -> None:
        self.losses: list[float | None] = []
        self._stop, self._after = stop, stop_after

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.losses.append(metrics.loss)
        if metrics.step == self._after:
            self._stop.stop(ExitCode.SIGTERM)


def attempt(folder: Path, number: int, device: str, stop_after: int | None = None) -> list[float | None]:
    """The losses of attempt ``number`` at a run of six steps, which resumes what the one before has saved."""
    stop = StopRequest()
    watch = _Watch(stop, stop_after)
    sets = {"train.steps": 6, "eval.interval": 0, "checkpoint.interval": 3, "run.threads": 1, "observer.use": "jsonl"}
    run = load_config("preset:tiny", sets=sets, plugins=[watch])
    (folder / "logs" / f"attempt-{number:03}").mkdir(parents=True)
    train_rank(run, World(device=device if device == "cpu" else f"{device}:0"), RunFolder(folder, number), stop)
    return watch.losses


def losses(folder: Path, device: str, *sets: str, **more: Any) -> list[float]:
    """The losses of :func:`steps`."""
    return [step["loss"] for step in steps(folder, device, *sets, **more)]
