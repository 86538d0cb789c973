"""What a rank holds of a microbatch between forward and backward, and the most while it runs, by method and ranks.

Every storage that an operator makes is watched while it exists. Two lengths of sequence are run: what grows from one to
the other depends on the sequence, the rest (masks, tables) does not. Kernels' own buffers are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.context.ours import METHODS, Grids, Sample, dense, pieces
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from benchmarks.support.shape import Shape
from benchmarks.tensor_parallel.model import Batch
from megatron_run_engine.estimate.step_memory import LiveBytes

SHAPE = Shape(layers=2, hidden=128, heads=8, sequence=0, vocab=256, micro_batch=1, microbatches=1)
#: Two lengths, of which one is twice the other.
LENGTHS = (1024, 2048)
RANKS = (1, 2, 4)
KV_HEADS = (SHAPE.heads, SHAPE.heads // 2)
#: How far what is held may lie above its share.
GOAL = 0.05
WHOLE = "whole samples"


def measure() -> dict[str, list[float]]:
    """Bytes for each further token, held and at most, of the largest rank, by heads and method: ``8 ring``."""
    ranks, found = dist.get_world_size(), {}
    grids = Grids()
    for kv_heads in KV_HEADS:
        for method in (WHOLE,) if ranks == 1 else METHODS:
            short, long = (_bytes(Sample(replace(SHAPE, sequence=each), kv_heads), grids, method) for each in LENGTHS)
            found[f"{kv_heads} {method}"] = ((long - short) / (LENGTHS[1] - LENGTHS[0])).tolist()
    return found


def _bytes(sample: Sample, grids: Grids, method: str) -> torch.Tensor:
    """Bytes of the rank that has most: held between forward and backward, and at most."""
    side = dense(sample) if method == WHOLE else pieces(sample, grids.context, method)
    tokens, labels = next(iter(Batch(sample.shape)))
    side.clear()
    live = LiveBytes()
    with live:
        before = live.now
        loss = side.forward(0, tokens, labels)
        held = live.now - before
        loss.backward()
        most = torch.tensor([held, live.peak - before])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most


def report(*, quick: bool) -> Iterator[str]:
    """Measure every method, and tell what was found."""
    del quick  # counting takes seconds
    yield "\n## Activations of a rank\n"
    yield f"{replace(SHAPE, sequence=LENGTHS[1])}, fp32; bytes for each token of a sample beyond {LENGTHS[0]:,}."
    yield "Share: what a rank holds times the ranks, over what one rank with whole samples holds.\n"
    columns = ("key-value heads", "ranks", "method", "held", "share", f"goal {1 + GOAL:.2f}", "at most", "share")
    found = {ranks: on_ranks(measure, ranks, {}) for ranks in RANKS}
    yield from table(columns, rows(found))


def rows(found: Mapping[int, Mapping[str, Sequence[float]]]) -> Iterator[tuple[object, ...]]:
    """A row a method and number of ranks, beside one rank."""
    for kv_heads in KV_HEADS:
        whole = found[1][f"{kv_heads} {WHOLE}"]
        for ranks, each in found.items():
            for name, (held, most) in each.items():
                heads, method = name.split(" ", 1)
                if int(heads) == kv_heads:
                    share = ranks * held / whole[0]
                    met = "yes" if share <= 1 + GOAL else "no"
                    peak = f"{ranks * most / whole[1]:.3f}"
                    yield (
                        f"{heads} of {SHAPE.heads}",
                        ranks,
                        method,
                        f"{held:,.0f}",
                        f"{share:.3f}",
                        met,
                        f"{most:,.0f}",
                        peak,
                    )
