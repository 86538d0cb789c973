"""Figure 7 of the Megatron-LM paper in small: a deep BERT with norms after each sum, and with norms before each half.

    python -m benchmarks.norm_order [--quick] > benchmarks/results/norm_order.md

Trains BERT on Python's standard library, byte by byte, shallow and deep, in both orders: the same samples and rates.
Draws the losses of every step in docs/images/norm_order.svg. ``--quick`` takes fewer steps, and draws nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.precision.curves import Curve
from benchmarks.precision.draw import picture
from benchmarks.support.command import run
from benchmarks.support.ranks import ROOT
from benchmarks.support.report import table
from megatron_run_engine.data.indexed_files import IndexedWriter

PICTURE = ROOT / "docs/images/norm_order.svg"
DEPTHS, ORDERS = (6, 36), ("post", "pre")
STEPS, FEW = 250, 20
#: Bytes of the library that are read; a run sees less than that.
BYTES = 4_000_000
#: What is the same for all runs.
SETTINGS = (
    *("model.use=bert", "model.head=pretraining", "model.hidden_size=64", "model.num_heads=2", "model.dropout=0"),
    *("train.sequence_length=64", "train.micro_batch_size=8", "train.global_batch_size=8"),
    *("train.lr=1e-3", "train.lr_shape=linear", "train.lr_warmup=10%", "data.use=sentence-pairs"),
    *("data.split=100,0,0", "eval.interval=0", "run.device=cpu", "run.threads=1", "observer.use=jsonl"),
)


def prepare(prefix: Path) -> None:
    """Write the library's files as a dataset of bytes, a document each."""
    left = BYTES
    with IndexedWriter(prefix, np.uint16) as writer:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            content = path.read_bytes()[:left]
            if not content:
                break
            left -= len(content)
            writer.add(np.frombuffer(content, np.uint8).astype(np.uint16))
            writer.end_document()


def trained(folder: Path, depth: int, order: str, steps: int) -> list[float]:
    """The loss of every step of one run."""
    own = (f"model.num_layers={depth}", f"model.norm.order={order}", f"train.steps={steps}")
    home = folder / f"{order}-{depth}"
    given = (*SETTINGS, *own, f"data.paths={folder / 'library'}", f"run.folder={home}")
    arguments = ["preset:tiny", *(argument for each in given for argument in ("--set", each))]
    subprocess.run([sys.executable, "-m", "megatron_run_cli", *arguments], check=True, stdout=subprocess.DEVNULL)
    lines = (home / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [float(json.loads(line)["loss"]) for line in lines]


def report(*, quick: bool) -> Iterator[str]:
    """Train all, draw, and say what the last quarter of the steps lost."""
    steps = FEW if quick else STEPS
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder) / "library")
        found = {(depth, order): trained(Path(folder), depth, order, steps) for depth in DEPTHS for order in ORDERS}
    if not quick:
        curves = {f"{depth} layers, {order}": Curve(tuple(each), (), ()) for (depth, order), each in found.items()}
        PICTURE.write_text(picture(curves), encoding="utf-8")
    yield f"\nWidth 64, rows of 64 bytes, {steps} steps of 8 rows, rate 1e-3. Loss is the mean of the last quarter.\n"
    columns = ("layers", "norms after sums", "norms before halves", "difference")
    yield from table(columns, (_row(depth, found) for depth in DEPTHS))


def _row(depth: int, found: dict[tuple[int, str], list[float]]) -> tuple[str, ...]:
    post, pre = (fmean(losses[-len(losses) // 4 :]) for losses in (found[depth, order] for order in ORDERS))
    return str(depth), f"{post:.3f}", f"{pre:.3f}", f"{post - pre:+.3f}"


if __name__ == "__main__":
    run("norm_order", "Orders of norms", __doc__ or "", report)
