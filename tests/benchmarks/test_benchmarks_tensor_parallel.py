"""The parts of the tensor-parallel benchmark that decide whether its tables can be believed; no time is asserted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.quiet import ratio
from benchmarks.support.shape import SMALL, TINY
from benchmarks.tensor_parallel.model import SHAPES, Batch
from benchmarks.tensor_parallel.ours import dense
from benchmarks.tensor_parallel.peers.dtensor import NAME as DTENSOR
from benchmarks.tensor_parallel.peers.dtensor import PlainGpt
from benchmarks.tensor_parallel.peers.megatron import our_weights, their_weights
from benchmarks.tensor_parallel.speed import ONE_RANK, OURS, TENSOR, measure, time_table
from benchmarks.tensor_parallel.traffic import Traffic, count, formula
from tests.support.ranks import run_ranks


def sample(one_rank: float, dtensor_foreign: float = 0.0) -> dict[str, float]:
    """A round in which ours took a second, DTensor two."""
    sides = {ONE_RANK: (one_rank, 0.0), TENSOR: (1.0, 0.0), DTENSOR: (2.0, dtensor_foreign)}
    seconds = {f"{name} seconds": seconds for name, (seconds, _) in sides.items()}
    return seconds | {f"{name} foreign": foreign for name, (_, foreign) in sides.items()}


def test_a_round_counts_for_the_sides_that_were_not_disturbed() -> None:
    rounds = [sample(9.0, 0.5), *(sample(2.0) for _ in range(3)), sample(9.0, 0.5), sample(9.0, 0.5)]
    kept, speed_up = ratio(rounds, ONE_RANK, TENSOR)
    assert (len(kept.samples), speed_up) == (6, 5.5)
    kept, speed_up = ratio(rounds, DTENSOR, TENSOR)
    assert (len(kept.samples), kept.quiet, speed_up) == (3, True, 2.0)


def test_rows_hold_medians() -> None:
    found = {
        "sent": dict.fromkeys((ONE_RANK, TENSOR, DTENSOR), 0.0),
        "apart": dict.fromkeys((ONE_RANK, TENSOR, DTENSOR), 2e-6),
        "samples": [sample(1.5) for _ in range(3)],
    }
    assert list(time_table(found))[3] == "| tensor | 1.000 | 1.500 | 2e-06 | 3 of 3 |"


def test_the_formula_is_that_of_the_paper() -> None:
    """Of the small model: 26 all-reduces of 4 x 256 x 384 fp32 numbers and 3 of 4 x 256, in each microbatch."""
    once = 26 * 4 * 256 * 384 * 4 + 3 * 4 * 256 * 4
    assert formula(SMALL, 2) == SMALL.microbatches * once
    assert formula(SMALL, 4) == 1.5 * formula(SMALL, 2)


def test_megatron_core_keeps_query_key_and_value_head_by_head() -> None:
    """Two heads of one feature: q0 k0 v0 q1 k1 v1."""
    names = [f"layers.3.attention.qkv.{each}.bias" for each in ("query", "key", "value")]
    weights = dict(zip(names, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]), strict=True))
    (theirs,) = their_weights(weights, 2).items()
    assert theirs[0] == "decoder.layers.3.self_attention.linear_qkv.bias"
    assert theirs[1].tolist() == [0, 1, 2, 3, 4, 5]


def test_megatron_core_s_names_lead_back_to_ours() -> None:
    weights = dense(TINY, Batch(TINY)).weights
    back = our_weights(their_weights(weights, TINY.heads), TINY.heads)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_the_plain_network_computes_our_losses_and_gradients() -> None:
    batch = Batch(TINY)
    ours, plain = dense(TINY, batch), PlainGpt(TINY)
    plain.load_state_dict(ours.weights)
    ours.clear()
    ours.step()
    for tokens, labels in batch:
        logits = plain(tokens).flatten(0, 1)
        (torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") * batch.scale).backward()
    results = ours.results()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, results[name], rtol=1e-4, atol=1e-7)


def measure_tiny(rank: int, world: int) -> dict[str, Any]:
    found = measure("tiny", 1)
    found["twice"] = count(lambda: [dist.all_reduce(torch.zeros(3)) for _ in range(2)], world)
    try:
        with Traffic(world):
            dist.broadcast(torch.zeros(1), 0)
    except ValueError as error:
        found["refused"] = str(error)
    return found


@pytest.mark.multiproc
@pytest.mark.nightly
def test_every_side_measures_and_sends_what_the_formula_says() -> None:
    found = run_ranks(measure_tiny, 2, timeout=280)[0]
    expected = {name: formula(SHAPES["tiny"], 2, **how) for name, how in OURS.items()}
    assert {name: found["sent"][name] for name in OURS} == expected
    assert found["sent"][ONE_RANK] == 0
    assert found["sent"][DTENSOR] == expected[TENSOR]
    assert found["apart"].keys() == found["sent"].keys()
    assert all(found["samples"][0][f"{name} seconds"] > 0 for name in found["sent"])
    assert found["twice"] == 2 * 3 * 4
    assert found["refused"] == "c10d::broadcast_ is a collective of unknown size"
