"""The losses of a run, step by step."""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

#: What is smaller than in the default run: a processor computes fp16 some ten times as slowly as fp32.
SMALLER = ("model.hidden_size=64", "train.sequence_length=64", "train.global_batch_size=8")
#: The runs by name, with what they do not share.
RUNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp32": ("train.precision=fp32",),
        "bf16": ("train.precision=bf16",),
        "fp16, scale 1024": ("train.precision=fp16", "scaler.loss_scale=1024"),
        "fp16, from 2^32": ("train.precision=fp16",),
    }
)


@dataclass(frozen=True)
class Curve:
    """By step: the loss, whether the step was skipped, and the loss scale it was taken with."""

    losses: tuple[float, ...]
    skipped: tuple[bool, ...]
    scales: tuple[float, ...]


def train_all(folder: Path, steps: int) -> None:
    """Train each of the runs, side by side, into folders named by them."""
    processes = [
        subprocess.Popen([sys.executable, "-m", "megatron_run_cli", *arguments(folder, name, steps)]) for name in RUNS
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a run ended with {max(codes)}")


def arguments(folder: Path, name: str, steps: int) -> list[str]:
    """Of the command that trains the run ``name``."""
    sets = {
        "run.folder": folder / name,
        "run.threads": 1,
        "train.steps": steps,
        "eval.interval": 0,
        "eval.sample": 0,
        "observer.use": "jsonl",
    }
    texts = (*SMALLER, *RUNS[name], *(f"{key}={value}" for key, value in sets.items()))
    return [argument for text in texts for argument in ("--set", text)]


def read(folder: Path) -> Curve:
    """The numbers that the run in ``folder`` reported."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    losses, skipped, scales = zip(*((s["loss"], s["skipped"], s["loss_scale"]) for s in steps), strict=True)
    return Curve(losses, skipped, scales)


def learned(curve: Curve, earlier: int = 0) -> float:
    """The mean loss of the last quarter of the steps, or of as many steps that lie so many ``earlier``."""
    end = len(curve.losses) - earlier
    return statistics.fmean(curve.losses[end - len(curve.losses) // 4 : end])


def apart(curve: Curve, fp32: Curve) -> float:
    """How much more than ``fp32``, after as many updates, ``curve`` has still to learn."""
    return learned(curve) - learned(fp32, sum(curve.skipped))


def write_csv(path: Path, curves: Mapping[str, Curve]) -> None:
    """A line a step: the loss of each run, and the last one's scale and skips."""
    *_, last = curves.values()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", *curves, "scale", "skipped"))
        losses = (curve.losses for curve in curves.values())
        for step, values in enumerate(zip(*losses, last.scales, last.skipped, strict=True), 1):
            *lost, scale, skipped = values
            writer.writerow((step, *(f"{loss:.5f}" for loss in lost), f"{scale:.0f}", int(skipped)))


def read_csv(path: Path) -> dict[str, Curve]:
    """The rows that :func:`write_csv` wrote: of all runs but the last only the losses."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    *names, last = [name for name in rows[0] if name not in ("step", "scale", "skipped")]
    losses = {name: tuple(float(row[name]) for row in rows) for name in (*names, last)}
    skipped, scales = tuple(row["skipped"] == "1" for row in rows), tuple(float(row["scale"]) for row in rows)
    return {**{name: Curve(losses[name], (), ()) for name in names}, last: Curve(losses[last], skipped, scales)}
