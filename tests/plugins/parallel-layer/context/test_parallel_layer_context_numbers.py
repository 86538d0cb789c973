"""Attention over pieces computes, and differentiates, what a softmax over whole samples does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron_run.contracts import AttentionShape, Pieces
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.comm import Groups, create_groups
from megatron_run_engine.runtime.sample_cut import held
from megatron_run_parallel_layer_context import ContextLayers, Options, pairs
from megatron_run_testing.build_contexts import context_at
from tests.support.plain_attention import attended, probabilities
from tests.support.ranks import run_ranks

METHODS = ("ring", "all_gather", "ulysses")
#: Tokens of a piece, of which a tile has 5: its last one has 2.
PIECE, TILE = 12, 5
GROUPED = AttentionShape(heads=8, kv_heads=4, head_size=6, layer=0)
#: By type: how far sums in another order, and factors rounded to the type, may be from float64.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Case(NamedTuple):
    """An attention over two samples; ``bounds`` are those of documents, in pieces of a sample."""

    shape: AttentionShape = GROUPED
    bounds: tuple[tuple[float, ...], ...] | None = None
    dtype: torch.dtype = torch.float64
    piece: int = PIECE
    tile: int = TILE

    def documents(self, ways: int) -> Tensor | None:
        """The bounds [b, any] of samples of ``ways`` pieces; the last document ends with the sample."""
        if self.bounds is None:
            return None
        length = ways * self.piece
        return torch.tensor([[min(length, int(bound * self.piece)) for bound in row] for row in self.bounds])


END = 99.0  # beyond every sample: its end
#: Bounds within pieces and at their edges; documents of no token, of one, and of the padding behind the others.
PACKED = ((0, 0.5, 1, 1, 1.75, 2.5, END, END), (0, 0, 0, 1 / PIECE, 1.5, 3, 3.25, END))
LONG = ((0, 3, END), (0, END, END))

CASES: Mapping[str, Case] = {
    "grouped queries": Case(),
    "a key for every head": Case(replace(GROUPED, kv_heads=8)),
    "scale": Case(replace(GROUPED, scale=0.9)),
    "softcap": Case(replace(GROUPED, softcap=0.7)),
    "window of one token": Case(replace(GROUPED, window=1)),
    "window below a tile": Case(replace(GROUPED, window=3)),
    "window below a piece": Case(replace(GROUPED, window=PIECE - 1)),
    "window of a piece": Case(replace(GROUPED, window=PIECE)),
    "window above a piece": Case(replace(GROUPED, window=PIECE + 7)),
    "window of two pieces": Case(replace(GROUPED, window=2 * PIECE)),
    "window of all": Case(replace(GROUPED, window=1000)),
    "window, softcap and scale": Case(replace(GROUPED, window=PIECE + 1, softcap=0.7, scale=0.9)),
    "documents": Case(bounds=PACKED),
    "documents of several pieces": Case(bounds=LONG),
    "documents with all variants": Case(replace(GROUPED, window=7, softcap=0.7, scale=0.9), bounds=PACKED),
    "pieces of one token": Case(piece=1),
    "several whole tiles": Case(replace(GROUPED, window=300), piece=150, tile=pairs.ROWS),
    "long, without a mask": Case(piece=150, tile=pairs.ROWS),
    **{f"{dtype}": Case(dtype=dtype) for dtype in TOLERANCES},
    **{f"{dtype} in tiles": Case(replace(GROUPED, window=17), PACKED, dtype) for dtype in TOLERANCES},
}
#: What shows on four ranks that owners and places of pieces are right.
FEW = ["grouped queries", "window above a piece", "documents with all variants", "torch.bfloat16 in tiles"]


def example(case: Case, ways: int) -> list[Tensor]:
    """Query, key, value and weights of the output of whole samples, rounded to the type of ``case``."""
    shape, generator = case.shape, torch.Generator().manual_seed(3)
    sizes = ((shape.heads, shape.head_size), *[(shape.kv_heads, shape.head_size)] * 2, (shape.heads * shape.head_size,))
    made = (torch.randn(ways * case.piece, 2, *size, generator=generator, dtype=torch.float64) for size in sizes)
    return [each.to(case.dtype) for each in made]


@cache
def expected(case: Case, ways: int) -> list[Tensor]:
    """The output and the gradients of query, key and value, in float64."""
    query, key, value, weights = (each.double() for each in example(case, ways))
    inputs = [each.requires_grad_() for each in (query, key, value)]
    out = attended(probabilities(query, key, case.shape, case.documents(ways)), value)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


def computed(core: nn.Module, case: Case, pieces: Pieces) -> list[Tensor]:
    """The same of this rank's pieces, by ``core``."""
    ways = 2 * pieces.ranks
    *inputs, weights = (held(each, pieces) for each in example(case, ways))
    inputs = [each.requires_grad_() for each in inputs]
    documents = case.documents(ways)
    with mock.patch.object(pairs, "ROWS", case.tile):
        out = core(*inputs, None, *([] if documents is None else [documents]))
        return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


def differences(core: nn.Module, case: Case, pieces: Pieces) -> Iterator[str]:
    """What is too far from the reference, with how far it is."""
    names = ("output", "query", "key", "value")
    found, whole = computed(core, case, pieces), expected(case, 2 * pieces.ranks)
    for name, mine, theirs in zip(names, found, whole, strict=True):
        right = held(theirs, pieces)
        assert mine.dtype == case.dtype
        assert mine.shape == right.shape
        difference = float((mine.double() - right).abs().max() / right.abs().max().clamp(min=1))
        if not difference < TOLERANCES[case.dtype]:
            yield f"{name}: {difference:.1e}"


def compare_on_rank(rank: int, world: int, names: list[str]) -> list[str]:
    """What differs on this rank of the cases ``names``, by any method."""
    topology, faults = Topology(Sizes(context=world), rank), list[str]()
    groups = create_groups(topology, timedelta(seconds=60))
    for name in names:
        case = CASES[name]
        context = context_at(topology, groups, train={"sequence_length": 2 * world * case.piece})
        for method in METHODS:
            layers = ContextLayers(context, DenseLayers(context), Options(method=method))
            core = layers.core_attention(case.shape, 0.0)
            faults += [f"{name}, {method}, {fault}" for fault in differences(core, case, context.pieces)]
    return faults


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("world", "names"), [(2, [*CASES]), (4, FEW), pytest.param(4, [*CASES], marks=pytest.mark.nightly)]
)
def test_pieces_of_several_ranks_equal_whole_samples(world: int, names: list[str]) -> None:
    assert run_ranks(compare_on_rank, world, names) == [[]] * world


def test_the_core_of_one_rank_is_that_of_the_layers_below() -> None:
    context = context_at(Topology(Sizes(), 0), Groups())
    base = DenseLayers(context)
    core = ContextLayers(context, base, Options()).core_attention(GROUPED, 0.0)
    assert type(core) is type(base.core_attention(GROUPED, 0.0))
