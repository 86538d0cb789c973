"""The parts of the single-process benchmark that decide whether its tables can be believed; no time is asserted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.single import waiting
from benchmarks.single.attention import CASES, measure_attention
from benchmarks.single.memory import measure_memory
from benchmarks.single.model import TINY
from benchmarks.single.ours import BareLoop, OurTraining
from benchmarks.single.peers.nanogpt import NanoGpt, gpt2_weights
from benchmarks.single.settings import measure_steps
from benchmarks.single.sides import BARE, NANOGPT, TRAINER, keys
from benchmarks.single.speed import APART, label, measure, rate_table
from tests.support.ranks import run_ranks


def sample(**seconds: float) -> dict[str, float]:
    """A round without disturbance; of each side in fp32 its seconds."""
    sides = {label(name, "fp32"): taken for name, taken in seconds.items()}
    return {
        f"{name} {what}": value
        for name, taken in sides.items()
        for what, value in (("seconds", taken), ("foreign", 0.0))
    }


def test_rows_hold_medians_of_ratios() -> None:
    taken = {TRAINER: 1.0, BARE: 0.8, NANOGPT: 1.5}
    found = {"apart": {label(name, "fp32"): 1e-6 for name in taken}, "samples": [sample(**taken)] * 3}
    assert list(rate_table(found))[2] == "| megatron-run, fp32 | 1.50 | 1e-06 | 3 of 3 |"


def test_gpt2_keeps_query_key_and_value_one_below_the_other() -> None:
    names = [f"layers.3.attention.qkv.{part}.bias" for part in ("query", "key", "value")]
    weights = dict(zip(names, torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]), strict=True))
    (theirs,) = gpt2_weights(weights).items()
    assert theirs[0] == "h.3.attn.c_attn.bias"
    assert theirs[1].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_plain_network_computes_our_loss_from_our_weights() -> None:
    ours, plain = BareLoop(TINY, "fp32"), NanoGpt(TINY)
    plain.load_state_dict(gpt2_weights(ours.weights))
    tokens, labels = torch.randint(TINY.vocab, (2, TINY.micro_batch, TINY.sequence))
    with torch.no_grad():
        expected = plain(tokens, labels).item()
    assert ours.step([(tokens, labels)]) == pytest.approx(expected, rel=1e-6)


def test_a_step_of_the_trainer_ends_after_one_step_and_the_next_goes_on() -> None:
    side = OurTraining(TINY, "fp32")
    losses = [side.step([]) for _ in range(3)]
    assert len(set(losses)) == 3
    assert not torch.are_deterministic_algorithms_enabled()
    first, second = side.batch(0), side.batch(1)
    assert len(first) == TINY.microbatches
    assert first[0][0].shape == (TINY.micro_batch, TINY.sequence)
    assert not torch.equal(first[0][0], second[0][0])
    side.close()


def measure_tiny(rank: int, world: int) -> dict[str, Any]:
    return {
        "speed": measure("tiny", 1),
        "memory": [measure_memory("tiny", name, "bf16", 1) for name in (TRAINER, NANOGPT)],
        "settings": measure_steps("tiny", "fp32", 1),
        "attention": measure_attention([0], 1),
    }


@pytest.mark.multiproc
@pytest.mark.nightly
def test_every_part_measures() -> None:
    """All sides that are installed train alike: their losses of three steps agree, or measuring refuses."""
    found = run_ranks(measure_tiny, 1, timeout=280)[0]
    sides = [label(*key) for key in keys()]
    assert list(found["speed"]["apart"]) == sides
    assert found["speed"]["apart"][label(NANOGPT, "fp32")] < APART["fp32"] / 10
    assert all(found["speed"]["samples"][0][f"{side} seconds"] > 0 for side in sides)
    assert all(2**25 < peak < 2**33 for peak in found["memory"])
    assert found["settings"][0]["seconds"] > 0
    (case,) = found["attention"]
    assert case["chosen"] in ("fused", "matmuls")
    assert CASES[0].dtype == "fp32"
    assert case["samples"][0]["matmuls seconds"] > 0


@pytest.mark.parametrize("busy", [False, True])
def test_ways_to_wait_are_compared(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a neighbour that has ended when the table is made; no sample counts as disturbed by him."""
    alive, here = [], Path(f"/proc/self/task/{os.getpid()}/children")

    def on_ranks(*_: object, environment: dict[str, str], **__: object) -> list[dict[str, float]]:
        alive.append(len(here.read_text().split()))
        return [{"seconds": 0.01 if environment else 0.03, "foreign": 0.5 * busy}] * 4

    before = len(here.read_text().split())
    monkeypatch.setattr(waiting, "on_ranks", on_ranks)
    row = waiting._row("tiny", busy, 2)
    assert row[2:5] == ("30.0", "10.0 (3.00)", "10.0 (3.00)")
    assert row[5] == ("all" if busy else "8 of 8; 8 of 8; 8 of 8")
    assert alive == [before + busy] * 6
    assert len(here.read_text().split()) == before
