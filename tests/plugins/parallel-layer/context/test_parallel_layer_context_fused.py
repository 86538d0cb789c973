"""The library's kernels compute what the tiles do, and only pairs that they can."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import Pieces
from megatron_run_parallel_layer_context import pairs
from megatron_run_parallel_layer_context.fused import Forward
from megatron_run_parallel_layer_context.pairs import Attended, Gradients, Rule

#: Two ranks of two pieces each, of which rank 0 has the first and the last.
RANKS, PIECE, HEADS, SIZE = 2, 75, 8, 16
KERNELS = ("fused", "fused_backward")


def found(
    rule: Rule, kv_heads: int, dtype: torch.dtype, documents: Tensor | None = None
) -> tuple[list[Tensor], list[int]]:
    """Rank 0's output, and the gradients of its queries and of all keys and values; and how often kernels ran."""
    generator = torch.Generator().manual_seed(1)
    tokens = 2 * PIECE

    def drawn(heads: int) -> Tensor:
        return torch.randn(2, heads, tokens, SIZE, generator=generator, dtype=torch.float64).to(dtype)

    query, grad = drawn(HEADS), drawn(HEADS)
    parts = [(drawn(kv_heads), drawn(kv_heads), Pieces(rank, RANKS).columns(RANKS * tokens)) for rank in range(RANKS)]
    columns = parts[0][2]
    with ExitStack() as within:
        kernels = [within.enter_context(mock.patch.object(pairs, name, wraps=getattr(pairs, name))) for name in KERNELS]
        seen = Attended(query, columns, documents, rule, torch.default_generator)
        for part in parts:
            seen.add(*part)
        gradients = Gradients(
            Forward(query, seen.out.to(dtype), seen.logsum, grad), columns, documents, rule, torch.default_generator
        )
        made = [gradients.of(*part) for part in parts]
    return [seen.out, gradients.query, *made], [kernel.call_count for kernel in kernels]


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
)
def test_the_kernels_compute_what_tiles_do(dtype: torch.dtype, tolerance: float, kv_heads: int) -> None:
    kernel, calls = found(Rule(0.3), kv_heads, dtype)
    with mock.patch.object(pairs, "fuses", return_value=False):
        tiles, none = found(Rule(0.3), kv_heads, dtype)
    # The last piece sees itself, the one before it, the one before that, and the first; the first sees itself.
    assert (calls, none) == ([5, 5], [0, 0])
    for mine, theirs in zip(kernel, tiles, strict=True):
        assert (mine - theirs).abs().max() < tolerance * theirs.abs().max()


@pytest.mark.parametrize(
    ("rule", "calls"),
    [
        (Rule(0.3, window=4 * PIECE), 5),
        (Rule(0.3, window=4 * PIECE - 1), 4),  # the last token does not see the first
        (Rule(0.3, window=PIECE), 2),  # each piece sees itself, and the last a part of the one before
        (Rule(0.3, window=PIECE - 1), 0),
        (Rule(0.3, softcap=2.0), 0),
        (Rule(0.3, dropout=0.5), 0),
    ],
)
def test_what_the_kernels_cannot_mask_is_left_to_tiles(rule: Rule, calls: int) -> None:
    assert found(rule, 4, torch.float32)[1] == [calls] * 2


def test_documents_are_left_to_tiles() -> None:
    assert found(Rule(0.3), 4, torch.float32, torch.tensor([[0, 4 * PIECE]] * 2))[1] == [0, 0]
