"""The way of GPUs, by cumulative lengths, with a stand-in for the kernel that keeps its conventions."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import Pieces
from megatron_run_parallel_layer_context import fused, pairs
from megatron_run_parallel_layer_context.fused import Forward
from megatron_run_parallel_layer_context.pairs import Attended, Gradients, Rule

RANKS, PIECE, HEADS, KV_HEADS, SIZE = 2, 20, 4, 2, 8
TOKENS = 2 * RANKS * PIECE
#: Bounds within pieces, at their ends and beyond them, documents of no tokens and of all.
DOCUMENTS = (
    [[0, 7, 20, 45, 45, 80], [0, 0, 80, 80, 80, 80]],
    [[0, 20, 40, 60, 80], [0, 1, 41, 79, 80]],
    None,
)


def spans(q_ends: Tensor, k_ends: Tensor) -> Any:
    """The rows of queries and keys of each document."""
    return zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True)


def scores(query: Tensor, key: Tensor, scale: float, *, causal: bool) -> Tensor:
    """[n, q, k] of [q, n, d] and [k, kv, d]; masked from the last query and key on, as the kernel does."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    found = torch.einsum("qnd,knd->nqk", query, key) * scale
    hidden = torch.ones(found.shape[1:], dtype=torch.bool).triu(1 + found.shape[2] - found.shape[1])
    return found.masked_fill(hidden, -torch.inf) if causal else found


def forward(*given: Any, scale: float) -> tuple[Tensor, ...]:
    query, key, value, q_ends, k_ends, longest_q, longest_k, dropout, causal, debug = given
    assert (q_ends.dtype, k_ends.dtype, dropout, debug) == (torch.int32, torch.int32, 0.0, False)
    out, logsum = torch.zeros_like(query), query.new_full((query.shape[1], len(query)), torch.inf)
    for (q0, q1), (k0, k1) in spans(q_ends, k_ends):
        assert q1 - q0 <= longest_q
        assert k1 - k0 <= longest_k
        if q1 > q0 and k1 > k0:
            found = scores(query[q0:q1], key[k0:k1], scale, causal=causal)
            logsum[:, q0:q1] = found.logsumexp(-1)
            values = value[k0:k1].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            out[q0:q1] = torch.einsum("nqk,knd->qnd", found.softmax(-1), values)
    return out, logsum, torch.empty(0), torch.empty(0), torch.empty(0)


def backward(*given: Any, scale: float) -> tuple[Tensor, ...]:
    grad, query, key, value, out, logsum, q_ends, k_ends, longest_q, longest_k, dropout, causal, drawn, unused = given
    assert (drawn.shape, drawn.dtype, unused.numel(), dropout) == ((2,), torch.uint64, 0, 0.0)
    assert max(longest_q, longest_k) <= PIECE
    groups = query.shape[1] // key.shape[1]
    slopes = [torch.zeros_like(each) for each in (query, key, value)]
    for (q0, q1), (k0, k1) in spans(q_ends, k_ends):
        if q1 > q0 and k1 > k0:
            rows, keys = slice(q0, q1), slice(k0, k1)
            weights = (scores(query[rows], key[keys], scale, causal=causal) - logsum[:, rows, None]).exp()
            wide_keys, wide_values = (x[keys].repeat_interleave(groups, dim=1) for x in (key, value))
            products = torch.einsum("qnd,knd->nqk", grad[rows], wide_values)
            products = weights * (products - (grad[rows] * out[rows]).sum(-1).t()[..., None]) * scale
            slopes[0][rows] += torch.einsum("nqk,knd->qnd", products, wide_keys)
            for total, factor, other in ((slopes[1], products, query), (slopes[2], weights, grad)):
                found = torch.einsum("nqk,qnd->knd", factor, other[rows])
                total[keys] += found.unflatten(1, (-1, groups)).sum(2)
    return tuple(slopes)


def found(documents: Tensor | None, rank: int) -> list[Tensor]:
    """The output of ``rank``, and the gradients of its queries and of all keys and values."""
    generator = torch.Generator().manual_seed(3)

    def drawn(heads: int) -> Tensor:
        return torch.randn(2, heads, 2 * PIECE, SIZE, generator=generator, dtype=torch.float64)

    query, grad = drawn(HEADS), drawn(HEADS)
    parts = [(drawn(KV_HEADS), drawn(KV_HEADS), Pieces(each, RANKS).columns(TOKENS)) for each in range(RANKS)]
    columns, rule = Pieces(rank, RANKS).columns(TOKENS), Rule(0.3)
    seen = Attended(query, columns, documents, rule, torch.default_generator)
    for part in parts:
        seen.add(*part)
    kept = Forward(query, seen.out, seen.logsum, grad)
    gradients = Gradients(kept, columns, documents, rule, torch.default_generator)
    made = [gradients.of(*part) for part in parts]
    return [seen.out, gradients.query, *made]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("bounds", DOCUMENTS)
def test_lengths_of_documents_give_what_masks_do(bounds: list[list[int]] | None, rank: int) -> None:
    documents = None if bounds is None else torch.tensor(bounds)
    with mock.patch.object(pairs, "fuses", return_value=False):
        tiles = found(documents, rank)
    kernels = SimpleNamespace(
        _flash_attention_forward=mock.Mock(wraps=forward), _flash_attention_backward=mock.Mock(wraps=backward)
    )
    with (
        mock.patch.object(pairs, "fuses", return_value=True),
        mock.patch.object(fused, "on_cpu", return_value=False),
        mock.patch.object(fused, "_ATEN", kernels),
    ):
        by_lengths = found(documents, rank)
    assert kernels._flash_attention_forward.call_count == kernels._flash_attention_backward.call_count == 5
    for mine, expected in zip(by_lengths, tiles, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
