"""Attention of samples whose tokens are split over context-parallel ranks, against attention over whole samples.

Legend: s sequence, b micro batch, n heads, k key-value heads, d head size, C context-parallel ranks. Here s = 16 and
b = 2: with two ranks, pieces have 4 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_run.contracts import AttentionCore, AttentionShape, Microbatch, Pieces
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import InputError
from megatron_run_engine.runtime.comm import Groups, create_groups
from megatron_run_engine.runtime.sample_cut import held, joined
from megatron_run_testing import Check, CheckFailed
from megatron_run_testing.build_contexts import context_at
from megatron_run_testing.parallel_layer.attention import PlainAttention
from megatron_run_testing.parallel_layer.cases import BATCH, random_values
from megatron_run_testing.parallel_layer.member import CreateLayers
from megatron_run_testing.parallel_layer.trial import Values, compare_values, values_of
from megatron_run_testing.ranks import Rehearsal

LENGTH = 16
_SHAPE = AttentionShape(heads=8, kv_heads=4, head_size=4, layer=0)
_VARIED = replace(_SHAPE, scale=0.9, window=6, softcap=0.7)
#: Bounds within pieces and on their edges; documents of one token and of none.
_DOCUMENTS = torch.tensor([[0, 3, 8, LENGTH, LENGTH], [0, 1, 6, 6, LENGTH]])
#: Seconds for all cases with one number of ranks.
_TIMEOUT = 90.0


class _Case(NamedTuple):
    """An attention core to make, and the documents that it is given."""

    shape: AttentionShape
    documents: Tensor | None = None
    dropout: float = 0.0

    def lacks(self, core: AttentionCore) -> str:
        """Say what ``core`` does not claim to do of it."""
        missing = sorted(self.shape.variants - core.variants)
        missing += ["packs"] * (self.documents is not None and not core.packs)
        return f"its attention does not claim {' and '.join(missing)}" if missing else ""


#: By the names of their checks.
_CASES: Mapping[str, _Case] = {
    "attention core of pieces": _Case(_SHAPE),
    "attention core of pieces without sharing of heads": _Case(replace(_SHAPE, kv_heads=_SHAPE.heads)),
    "attention core of pieces with a window": _Case(replace(_SHAPE, window=_VARIED.window)),
    "attention core of pieces with a window within one": _Case(replace(_SHAPE, window=2)),
    "attention core of pieces with capped scores": _Case(replace(_SHAPE, softcap=_VARIED.softcap)),
    "attention core of pieces with scale, window and cap": _Case(_VARIED),
    "attention core of pieces that packs documents": _Case(_SHAPE, _DOCUMENTS),
    "attention core of pieces that packs documents and has all variants": _Case(_VARIED, _DOCUMENTS),
    "attention dropout differs between pieces": _Case(AttentionShape(4, 4, LENGTH, 0), dropout=0.5),
}


def piece_checks(create: CreateLayers, ranks: Sequence[int], dtype: torch.dtype, tolerance: float) -> tuple[Check, ...]:
    """The checks of a factory that serves ``parallel.context``, each with every number of ``ranks``."""
    bench = _Bench(create, tuple(ranks), dtype, tolerance)
    return tuple(Check(name, partial(bench.check, name)) for name in _CASES) if ranks else ()


@dataclass
class _Bench:
    create: CreateLayers
    ranks: tuple[int, ...]
    dtype: torch.dtype
    tolerance: float

    def check(self, name: str) -> str:
        """Judge the case ``name``; the reason if there was nothing to try."""
        reasons = []
        for size in self.ranks:
            found = self._on_ranks.found(size, name, f"on {size} context-parallel ranks")
            try:
                reasons.append(_judged(_CASES[name], found, self.tolerance))
            except CheckFailed as failure:
                raise CheckFailed(f"{name}: {failure}") from None
        return reasons[0] if all(reasons) else ""

    @cached_property
    def _on_ranks(self) -> Rehearsal[str]:
        return Rehearsal(_try_on_rank, (self.create, self.dtype), list(_CASES), _TIMEOUT, "PluginLayers")


def _whole(case: _Case, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Query, key and value of whole samples, and a weight for each value of the output.

    With dropout queries see all keys alike, and values are one-hot, so that the output shows what was dropped.
    """
    shape = case.shape
    query, key = (random_values(LENGTH, BATCH, heads, shape.head_size) for heads in (shape.heads, shape.kv_heads))
    value, weights = key.flip(0), torch.linspace(-1, 1, query.numel(), dtype=torch.float64).view(LENGTH, BATCH, -1)
    if case.dropout:
        query, value = torch.zeros_like(query), torch.eye(LENGTH)[:, None, None].expand_as(key)
    return [each.to(dtype) for each in (query, key.flip(2), value)], weights


def _try_on_rank(
    rank: int, world: int, create: CreateLayers, dtype: torch.dtype, names: Sequence[str]
) -> Iterator[list[Values] | str]:
    """Yield what one of ``world`` context-parallel ranks finds of each case, or why there is nothing to try."""
    topology = Topology(Sizes(context=world), rank)
    groups = create_groups(topology, timedelta(seconds=_TIMEOUT))
    for name in names:
        yield _tried(create, topology, groups, dtype, _CASES[name])


def _tried(
    create: CreateLayers, topology: Topology, groups: Groups, dtype: torch.dtype, case: _Case
) -> list[Values] | str:
    context = context_at(topology, groups, dtype=dtype, device="cpu", train={"sequence_length": LENGTH})
    try:
        core = create(context).core_attention(case.shape, case.dropout)
    except InputError as refusal:
        return f"it refuses: {refusal.what}"
    able = AttentionCore.of(core)
    if not able.pieces:
        raise CheckFailed("its attention does not claim pieces, so that it would see the tokens of its own rank alone")
    if lacks := case.lacks(able):
        return lacks
    given = (None,) if case.documents is None else (None, case.documents)
    inputs, weights = _whole(case, dtype)

    def passed(segment: int) -> list[Values]:
        """Output and input gradients from one place of the random streams, of which others take some between."""
        context.rng.position(Microbatch(0, 1, 0, {}), 3, segment)
        parts = [held(each, context.pieces).clone().requires_grad_() for each in inputs]
        output = core(*parts, *given)
        torch.rand(3)
        output.backward(held(weights, context.pieces).to(output))
        return [values_of(each) for each in (output, *(each.grad for each in parts if each.grad is not None))]

    core.train()
    first = passed(0)
    return [*first, *passed(0), *passed(1)] if case.dropout else first


def _judged(case: _Case, found: Sequence[list[Values] | str], tolerance: float) -> str:
    """Compare the ranks' results with the same pieces of whole samples, or with each other's."""
    reasons = [each for each in found if isinstance(each, str)]
    if reasons:
        if len(reasons) < len(found):
            raise CheckFailed(f"only some ranks have it: {reasons[0]}")
        return reasons[0]
    results = [each for each in found if not isinstance(each, str)]
    if case.dropout:
        _judge_dropout(case, results, tolerance)
        return ""
    inputs, weights = _whole(case, torch.float64)
    learned = [each.clone().requires_grad_() for each in inputs]
    output = PlainAttention(case.shape)(*learned, None, case.documents)
    output.backward(weights)
    expected = [output, *(each.grad for each in learned if each.grad is not None)]
    names = ("output", *(f"gradient of input {index}" for index in range(3)))
    for index, values in enumerate(results):
        pieces = Pieces(index, len(results))
        if len(values) != len(expected):
            raise CheckFailed(f"rank {index} has {len(values) - 1} gradients of its three inputs")
        for name, value, whole in zip(names, values, expected, strict=True):
            what = f"{name} on context rank {index} of {len(results)}"
            compare_values(what, value, values_of(held(whole, pieces)), tolerance)
    return ""


def _judge_dropout(case: _Case, results: Sequence[list[Values]], tolerance: float) -> None:
    """Masks are those of a place: the same again, others elsewhere and on other ranks, and the backward's."""
    for index, values in enumerate(results):
        first, again, elsewhere = (values[start : start + 4] for start in (0, 4, 8))
        if not all(map(np.array_equal, first, again)):
            raise CheckFailed(f"context rank {index} drops other values when it runs again from the same position")
        if np.array_equal(first[0], elsewhere[0]):
            raise CheckFailed(f"context rank {index} drops the same values in another segment")
    ranks = len(results)
    output, of_values = (
        joined(torch.cat([torch.from_numpy(values[place]) for values in results]), Pieces(0, ranks)) for place in (0, 3)
    )
    kept = output.unflatten(2, (case.shape.heads, LENGTH)) * torch.arange(1, LENGTH + 1)[:, None, None, None]
    seen = torch.ones(LENGTH, LENGTH).tril()[:, None, None].expand_as(kept) > 0
    if not 0.8 < (mean := float(kept[seen].mean())) < 1.2 or (kept[~seen] != 0).any():
        raise CheckFailed(f"attention with dropout gives {mean:.3f} of the probabilities, expected about 1")
    for index, other in combinations(range(ranks), 2):
        block, beside = (_own_block(kept, Pieces(each, ranks)) for each in (index, other))
        if torch.equal(block, beside):
            raise CheckFailed(f"attention drops the same values on context ranks {index} and {other}")
    weights = _whole(case, torch.float64)[1].unflatten(2, (case.shape.heads, LENGTH))
    right = torch.einsum("qbnk,qbnd->kbnd", output.unflatten(2, (case.shape.heads, LENGTH)), weights)
    compare_values("gradient of the values that dropout has left", values_of(of_values), values_of(right), tolerance)


def _own_block(kept: Tensor, pieces: Pieces) -> Tensor:
    """Return what the first piece of a rank keeps of itself."""
    piece = pieces.columns(LENGTH)[0]
    return kept[piece.start : piece.stop, ..., piece.start : piece.stop] > 0
