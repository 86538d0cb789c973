"""Dropout of attention over pieces: the masks of forward and backward are one, and those of ranks differ.

Values that are one-hot show the masks: what a query gets of a key is its probability, times what dropout made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import AttentionShape, Microbatch
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.comm import create_groups
from megatron_run_engine.runtime.sample_cut import held
from megatron_run_parallel_layer_context import ContextLayers, Options
from megatron_run_testing.build_contexts import context_at
from tests.support.plain_attention import attended, probabilities
from tests.support.ranks import run_ranks

WORLD, LENGTH, RATE = 2, 48, 0.25
#: Values have a feature for each token.
SHAPE = AttentionShape(heads=4, kv_heads=2, head_size=LENGTH, layer=0, scale=0.05)
BOUNDS = torch.tensor([[0, 20, LENGTH], [0, 7, LENGTH]])


def example() -> list[Tensor]:
    """Query, key, one-hot values and weights of the output."""
    generator = torch.Generator().manual_seed(2)
    query, key, weights = (
        torch.randn(LENGTH, 2, heads, LENGTH, generator=generator, dtype=torch.float64)
        for heads in (SHAPE.heads, SHAPE.kv_heads, SHAPE.heads)
    )
    value = torch.eye(LENGTH, dtype=torch.float64)[:, None, None].expand(LENGTH, 2, SHAPE.kv_heads, LENGTH)
    return [query, key, value.clone(), weights.flatten(2)]


def drop_on_rank(rank: int, world: int, method: str) -> list[Any]:
    """For no documents and some: this rank's output and gradients, of two steps; at last the output of an evaluation.

    Between forward and backward of the first step others draw.
    """
    topology = Topology(Sizes(context=world), rank)
    context = context_at(topology, create_groups(topology, timedelta(seconds=60)), train={"sequence_length": LENGTH})
    core = ContextLayers(context, DenseLayers(context), Options(method=method)).core_attention(SHAPE, RATE)
    found = []
    for documents in ((), (BOUNDS,)):
        for step in (1, 2):
            *inputs, weights = (held(each, context.pieces) for each in example())
            inputs = [each.requires_grad_() for each in inputs]
            context.rng.position(Microbatch(0, step, 0, {}), layer=0, segment=0)
            out = core(*inputs, None, *documents)
            after = torch.rand(step)  # noqa: F841  # another layer of the segment draws too
            state = context.rng.sharded.get_state()
            gradients = torch.autograd.grad(out, inputs, weights)
            assert torch.equal(context.rng.sharded.get_state(), state)
            found.append([each.detach().numpy() for each in (out, *gradients)])
    inputs = [held(each, context.pieces) for each in example()[:3]]
    return [*found, core.eval()(*inputs).numpy()]


@pytest.fixture(scope="module", params=["ring", "all_gather"])
def dropped(request: pytest.FixtureRequest) -> list[Any]:
    """What the ranks of each method found."""
    return run_ranks(drop_on_rank, WORLD, request.param)


def joined_parts(parts: Sequence[Any]) -> Tensor:
    """The parts of both ranks, whole: each rank has two pieces, from front and back."""
    (first, last), (second, third) = (torch.from_numpy(each).chunk(2) for each in parts)
    return torch.cat((first, second, third, last))


def whole(dropped: list[Any], number: int) -> list[Tensor]:
    return [joined_parts(parts) for parts in zip(*(rank[number] for rank in dropped), strict=True)]


def masks(out: Tensor, bounds: Tensor | None) -> Tensor:
    """What dropout multiplied each probability by, [b, n, s, s]; 0 where nothing is seen."""
    query, key, *_ = example()
    undropped = probabilities(query, key, SHAPE, bounds)
    shown = out.unflatten(2, (SHAPE.heads, LENGTH)).permute(1, 2, 0, 3)
    return torch.where(undropped > 0, shown / undropped, 0)


@pytest.mark.multiproc
@pytest.mark.parametrize("number", range(4))
def test_gradients_are_those_of_the_masks_of_the_forward(dropped: list[Any], number: int) -> None:
    bounds = BOUNDS if number >= 2 else None
    out, *found = whole(dropped, number)
    kept = masks(out, bounds)
    *inputs, weights = example()
    query, key, value = (each.requires_grad_() for each in inputs)
    right = attended(probabilities(query, key, SHAPE, bounds) * kept.detach(), value)
    torch.testing.assert_close(out, right.detach())
    for mine, theirs in zip(found, torch.autograd.grad(right, (query, key, value), weights), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.multiproc
def test_masks_drop_at_the_rate_and_differ_between_places(dropped: list[Any]) -> None:
    kept = masks(whole(dropped, 0)[0], None)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    values = kept[..., seen]
    zero = values == 0
    torch.testing.assert_close(values[~zero], torch.full_like(values[~zero], 1 / (1 - RATE)))
    deviation = (RATE * (1 - RATE) / zero.numel()) ** 0.5
    assert abs(zero.double().mean() - RATE) < 4 * deviation
    # Samples, heads, and the four pieces, of which rank 0 draws the first mask and the last, differ from each other.
    size = LENGTH // 4
    diagonal = [kept[..., piece : piece + size, piece : piece + size] > 0 for piece in range(0, LENGTH, size)]
    own = [mask for piece in diagonal for mask in piece.flatten(0, 1)]
    assert len({tuple(mask[seen[:size, :size]].tolist()) for mask in own}) == 4 * 2 * SHAPE.heads
    assert not torch.equal(kept, masks(whole(dropped, 1)[0], None)), "steps differ"


@pytest.mark.multiproc
def test_an_evaluation_drops_nothing(dropped: list[Any]) -> None:
    query, key, value, _ = example()
    out = joined_parts([rank[-1] for rank in dropped])
    torch.testing.assert_close(out, attended(probabilities(query, key, SHAPE), value))
