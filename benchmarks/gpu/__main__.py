"""Measures training on one GPU: its ceilings, models against peers, captured graphs, experts, profile, saves, start.

    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --piece ceilings [--out gpu] [--seconds 500] [--device cuda] [--quick]
    python -m benchmarks.gpu --piece 124m --side "megatron-run, compiled" "nanoGPT, compiled"
    python -m benchmarks.gpu --page [--out gpu] > benchmarks/results/gpu.md

A piece takes less than nine minutes. With each side that was measured it writes ``OUT/PIECE.json``, its part of the
page, anew. Sides share a process as long as none fails; after ``--seconds`` none begins. With ``--device cpu --quick``
everything runs at tiny sizes: then only the device is new on the day.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import experts, host, kernels, models, planned
from benchmarks.gpu.measuring import Day, ceilings
from benchmarks.gpu.page import page
from benchmarks.support.report import environment

#: Name of a piece -> what measures it, and yields its record anew whenever there is more of it.
PIECES: Mapping[str, Callable[[Day], Iterator[Mapping[str, Any]]]] = {
    "ceilings": ceilings,
    "kernels": kernels.measure,
    **{name: models.piece(name) for name in models.GPT},
    "planner": planned.measure,
    "experts": experts.measure,
    "graphs": models.graphs,
    "profile": host.profile,
    "saves": host.saves,
    "start": host.start,
}


def main(words: Sequence[str] | None = None) -> None:
    """Measure the pieces that were asked for, or all; or print the page of those that were measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--piece", nargs="+", choices=PIECES, default=list(PIECES), metavar="NAME")
    parser.add_argument("--side", nargs="+", default=[], metavar="NAME", help="of models and graphs, only these sides")
    parser.add_argument("--list", action="store_true", help="print the names of the pieces")
    parser.add_argument("--page", action="store_true", help="print the page of the pieces in OUT, measure nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few samples")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no side begins or goes on")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results")
    given = parser.parse_args(words)
    if given.list:
        print("\n".join(PIECES))
        return
    if given.device == "cuda" and not given.page and not torch.cuda.is_available():
        parser.error("no GPU is here; for a trial without one: --device cpu --quick")
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.page:
        day = Day(given.device, given.quick, time.monotonic() + given.seconds, tuple(given.side))
        for name in given.piece:
            print(f"{name}:", flush=True)
            start = time.perf_counter()
            for found in PIECES[name](day):
                record = {"machine": environment(), "took": time.perf_counter() - start, **found}
                (given.out / f"{name}.json").write_text(json.dumps(record, indent=1), "utf-8")
    measured = {name: given.out / f"{name}.json" for name in PIECES}
    print(
        "\n".join(page({name: json.loads(file.read_text("utf-8")) for name, file in measured.items() if file.exists()}))
    )


if __name__ == "__main__":
    main()
