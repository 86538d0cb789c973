"""Whether bf16 learns what fp32 learns, and fp16 gets along with a loss scale that starts far too high.

    python -m benchmarks.precision [--quick] > benchmarks/results/precision.md

Trains a smaller model on the default run's data in each precision: the same weights, samples and rates. fp16 starts
with the dynamic scaler's 2^32. Writes the losses of every step to benchmarks/results/precision.csv and draws them in
docs/images/precision.svg; prints benchmarks/results/precision.md. Fails when a goal is missed. ``--quick`` takes fewer
steps, and writes and draws nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.precision.curves import RUNS, SMALLER, Curve, apart, learned, read, read_csv, train_all, write_csv
from benchmarks.precision.draw import picture
from benchmarks.support.command import run
from benchmarks.support.ranks import ROOT
from benchmarks.support.report import table

#: How far the mean loss of the last quarter of the steps may lie from fp32's.
TOLERANCE = 0.02
AFTER_SKIPS = 0.05
STEPS, FEW = 200, 60
DATA = ROOT / "benchmarks/results/precision.csv"
PICTURE = ROOT / "docs/images/precision.svg"


def report(*, quick: bool) -> Iterator[str]:
    """Train, write, draw, and judge."""
    steps = FEW if quick else STEPS
    with tempfile.TemporaryDirectory() as folder:
        train_all(Path(folder), steps)
        curves = {precision: read(Path(folder, precision)) for precision in RUNS}
    if not quick:
        write_csv(DATA, curves)
        PICTURE.write_text(picture(read_csv(DATA)), encoding="utf-8")
    yield f"\nThe default run's data and rates, {' '.join(SMALLER)}, {steps} steps."
    yield "Loss is the mean of the last quarter of the steps, beside fp32's as many steps earlier as were skipped."
    yield f"Goal: at most {TOLERANCE} apart, {AFTER_SKIPS} where steps were skipped, whose samples are other ones.\n"
    columns = ("run", "skipped", "first scale", "last scale", "loss", "beside fp32")
    yield from table(columns, (row(name, curve, curves["fp32"]) for name, curve in curves.items()))
    missed = [name for name, curve in curves.items() if not _is_near(curve, curves["fp32"])]
    if missed:
        raise SystemExit(f"the goal is missed by {', '.join(missed)}")


def row(name: str, curve: Curve, fp32: Curve) -> tuple[object, ...]:
    """A line of the table."""
    scales = f"{curve.scales[0]:.0f}", f"{curve.scales[-1]:.0f}"
    return name, sum(curve.skipped), *scales, f"{learned(curve):.4f}", f"{apart(curve, fp32):+.4f}"


def _is_near(curve: Curve, fp32: Curve) -> bool:
    return abs(apart(curve, fp32)) <= (AFTER_SKIPS if any(curve.skipped) else TOLERANCE)


if __name__ == "__main__":
    run("precision", "Precisions", __doc__ or "", report)
