"""The parts of the context-parallel benchmark that decide whether its tables can be believed; no time is asserted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.context import memory, messages
from benchmarks.context.messages import formula, sample
from benchmarks.context.ours import METHODS, Sample
from benchmarks.context.peers.torch import NAME as TORCH
from benchmarks.context.peers.torch import refusal
from benchmarks.context.speed import ONE_RANK, sides
from benchmarks.support.compare import compare
from benchmarks.support.shape import TINY
from benchmarks.tensor_parallel.traffic import count
from tests.support.ranks import run_ranks


def test_grouped_queries_shorten_the_messages_of_keys() -> None:
    """Of 512 tokens on 2 ranks, 2 samples: keys and values of 8 heads of 16, three times across as fp32."""
    once = 2 * (256 * 2) * 8 * 16 * 4
    assert formula(sample(8, "float32"), 2, "ring") == 3 * once
    assert formula(sample(2, "float32"), 2, "ring") == 3 * once / 4
    assert formula(sample(8, "bfloat16"), 2, "all_gather") == 2 * once
    assert formula(sample(8, "float32"), 2, "ulysses") == 2 * once


def test_a_share_is_that_of_whole_samples() -> None:
    heads = memory.KV_HEADS
    found = {
        1: {f"{each} {memory.WHOLE}": (1000.0, 2000.0) for each in heads},
        2: {f"{each} ring": (525.0, 1100.0) for each in heads} | {f"{each} ulysses": (526.0, 1000.0) for each in heads},
    }
    rows = [[str(cell) for cell in row] for row in memory.rows(found)]
    assert [row[1:] for row in rows[:3]] == [
        ["1", memory.WHOLE, "1,000", "1.000", "yes", "2,000", "1.000"],
        ["2", "ring", "525", "1.050", "yes", "1,100", "1.100"],
        ["2", "ulysses", "526", "1.052", "no", "1,000", "1.000"],
    ]
    assert [row[0] for row in rows] == [f"{each} of {memory.SHAPE.heads}" for each in heads for _ in range(3)]


def measure_tiny(rank: int, world: int) -> dict[str, Any]:
    made = {name: make() for name, make in sides(Sample(replace(TINY, sequence=16))).items()}
    results = {}
    for name, side in made.items():
        side.clear()
        side.step()
        results[name] = side.results()
    # Rows that stay are not sent: 3 of 4 go to the other rank.
    rows, own = torch.zeros(4, 5), [3, 1] if rank else [1, 3]
    exchange = count(lambda: dist.all_to_all_single(torch.zeros(sum(own), 5), rows, own, own), world)
    return {
        "apart": {name: compare(each, results[ONE_RANK], 1e-4, 1e-4) for name, each in results.items()},
        "sent": messages.measure(4, "float32"),
        "exchange": exchange,
        "refusal": refusal(),
    }


@pytest.mark.multiproc
@pytest.mark.nightly
def test_every_side_computes_the_same_and_sends_what_the_formula_says() -> None:
    found = run_ranks(measure_tiny, 2, timeout=280)[0]
    assert {ONE_RANK, TORCH, *METHODS} <= found["apart"].keys()
    assert found["sent"] == {method: formula(sample(4, "float32"), 2, method) for method in METHODS}
    assert found["exchange"] == 3 * 5 * 4
    assert "for_cpu" in found["refusal"]
