"""Whether bf16 learns what fp32 learns, and fp16 gets along with a loss scale that starts far too high.

    python -m benchmarks.precision [STEPS]

Trains a smaller model on the default run's data in each precision: the same weights, samples and rates. fp16 starts
with the dynamic scaler's 2^32. Writes the losses of every step to benchmarks/results/precision.csv and draws them in
docs/images/precision.svg; prints benchmarks/results/precision.md. Fails when a goal is missed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.precision.curves import RUNS, SMALLER, Curve, apart, learned, read, read_csv, train_all, write_csv
from benchmarks.precision.draw import picture
from benchmarks.support.ranks import ROOT
from benchmarks.support.report import heading, table

#: How far the mean loss of the last quarter of the steps may lie from fp32's.
TOLERANCE = 0.02
AFTER_SKIPS = 0.05
STEPS = 200
DATA = ROOT / "benchmarks/results/precision.csv"
PICTURE = ROOT / "docs/images/precision.svg"


def main() -> None:
    """Train, write, draw, and judge."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    with tempfile.TemporaryDirectory() as folder:
        train_all(Path(folder), steps)
        curves = {precision: read(Path(folder, precision)) for precision in RUNS}
    write_csv(DATA, curves)
    PICTURE.write_text(picture(read_csv(DATA)), encoding="utf-8")
    print("\n".join(heading("Precisions", ("python", "-m", "benchmarks.precision", str(steps)))))
    print(f"\nThe default run's data and rates, {' '.join(SMALLER)}, {steps} steps.")
    print("Loss is the mean of the last quarter of the steps, beside fp32's as many steps earlier as were skipped.")
    print(f"Goal: at most {TOLERANCE} apart, {AFTER_SKIPS} where steps were skipped, whose samples are other ones.\n")
    columns = ("run", "skipped", "first scale", "last scale", "loss", "beside fp32")
    print("\n".join(table(columns, (row(name, curve, curves["fp32"]) for name, curve in curves.items()))))
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
    main()
