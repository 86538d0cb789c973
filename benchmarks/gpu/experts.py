"""A layer of experts by one grouped product, beside a loop over them and a dense layer of as many products."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.measuring import Day, alone, seconds
from benchmarks.moe.model import TINY, Shape

GROUPED = "grouped products"
LARGE = Shape(experts=8, top_k=2, hidden=2048, ffn=5632, tokens=8192)


def measure(day: Day) -> Iterator[dict[str, Any]]:
    """The piece: milliseconds of forward and backward of each side in bf16."""
    yield alone(measure_sides, day)


def measure_sides(device: str, *, quick: bool) -> dict[str, Any]:
    """Every side on the same weights and tokens; results are compared by ``benchmarks.moe``."""
    from benchmarks.moe.ours import OurLayer
    from benchmarks.moe.peers.dense import NAME as DENSE
    from benchmarks.moe.peers.dense import DenseLayer
    from benchmarks.moe.peers.naive import NAME as NAIVE
    from benchmarks.moe.peers.naive import NaiveLoop
    from megatron_run_testing.build_contexts import on_device

    shape = TINY if quick else LARGE
    found: dict[str, Any] = {"shape": str(shape)}
    with on_device(device if device == "cpu" else "cuda:0"):
        for name, kind in ((GROUPED, OurLayer), (NAIVE, NaiveLoop), (DENSE, DenseLayer)):
            side = kind(shape, "bf16")

            def step(side: Any = side) -> None:
                side.clear()
                side.step()

            found[name] = 1e3 * statistics.median(seconds(step, device, 3 if quick else 30))
    return found
