"""The first layer of a model: learned positions, whole or of the tokens that a rank has."""

from __future__ import annotations

import pytest
import torch

from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import InputError
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn import Embedding, TransformerSpec
from megatron_run_engine.nn.embedding import Positions
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing.build_contexts import context_at, prepare, single_process_context

SPEC = TransformerSpec(
    layers=1, hidden=8, heads=2, kv_heads=2, ffn=8, vocab=31, sequence_length=12, dropout=0.0, init_std=0.5
)


def positions(rank: int, size: int, sequence: bool) -> Positions:
    context = context_at(Topology(Sizes(tensor=size), rank), Groups(), sequence=sequence)
    made = Positions(context, SPEC)
    prepare(context, [made])  # type: ignore[list-item]  # parameters are all that is looked at
    return made


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length", [12, 8])  # a prompt may be shorter than the model
def test_ranks_that_split_the_sequence_add_the_positions_of_their_own_tokens(size: int, length: int) -> None:
    x, weights = torch.randn(length, 2, 8).double(), torch.randn(length, 2, 8).double()
    whole = positions(0, 1, sequence=False)
    (expected := whole(x)).backward(weights)
    total = torch.zeros_like(main_grad(whole.weight))
    for rank, (mine, mine_weights) in enumerate(zip(x.chunk(size), weights.chunk(size), strict=True)):
        split = positions(rank, size, sequence=True)
        assert split.parameter_specs["weight"].partial_over == "tensor"
        torch.testing.assert_close(split.weight, whole.weight)
        (found := split(mine)).backward(mine_weights)
        torch.testing.assert_close(found, expected.chunk(size)[rank])
        total += main_grad(split.weight)
    torch.testing.assert_close(total, main_grad(whole.weight))


def test_ranks_that_all_hold_the_sequence_add_all_positions_and_sum_nothing() -> None:
    x, whole = torch.randn(12, 2, 8).double(), positions(0, 1, sequence=False)
    split = positions(1, 2, sequence=False)
    torch.testing.assert_close(split(x), whole(x))
    assert split.parameter_specs["weight"].partial_over is None


def test_a_sequence_that_is_too_long_is_refused() -> None:
    context = single_process_context()
    embedding = Embedding(context, SPEC, DenseLayers(context))
    with pytest.raises(InputError) as caught:
        embedding(torch.zeros(1, 13, dtype=torch.long))
    assert str(caught.value) == ("a sequence of 13 tokens is longer than the model's 12; raise train.sequence_length")
