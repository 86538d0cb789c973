"""Attention by exchange: each rank gives away tokens of most heads, and gets all tokens of a few.

Legend: s tokens of a sample, C context-parallel ranks, b micro batch, n heads, k key-value heads, d head size; n and k
are those of this tensor-parallel rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import AttentionCore
from megatron_run_engine.runtime import held, joined

if TYPE_CHECKING:
    from megatron_run.contracts import Pieces
    from megatron_run_engine.runtime import ParallelGroup


class UlyssesAttention(nn.Module, AttentionCore):
    """Runs ``base``, a core of 1/C of the heads, on whole samples."""

    pieces = True

    def __init__(self, base: nn.Module, pieces: Pieces, peers: ParallelGroup) -> None:
        super().__init__()
        self.base, self._pieces, self._peers = base, pieces, peers
        self.packs, self.variants = AttentionCore.of(base).packs, AttentionCore.of(base).variants

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *documents: Tensor
    ) -> Tensor:
        """Query [s/C, b, n, d], key and value [s/C, b, k, d] -> [s/C, b, n*d]; ``mask`` is that of whole samples."""
        ways = self._pieces.ranks
        by_rank = [x.unflatten(2, (ways, -1)) for x in (query, key, value)]  # [s/C, b, C, heads/C, d]
        sizes = [x.shape[3] for x in by_rank]
        heads = torch.cat(by_rank, dim=3).movedim(2, 0)  # [C, s/C, b, (n+2k)/C, d]
        whole: Tensor = _TokensForHeads.apply(heads, self._pieces, self._peers)  # type: ignore[no-untyped-call]
        attended = self.base(*whole.split(sizes, dim=2), mask, *documents)  # [s, b, n*d/C]
        parts: Tensor = _HeadsForTokens.apply(attended, self._pieces, self._peers)  # type: ignore[no-untyped-call]
        return parts.movedim(0, 2).flatten(2)  # [C, s/C, b, n*d/C] -> [s/C, b, n*d]


def _exchanged(parts: Tensor, peers: ParallelGroup) -> Tensor:
    """Part r of ``parts`` [C, ...] goes to peer r, whose part for this rank comes in its place."""
    rows = [1] * peers.size
    return peers.exchange(parts.contiguous(), rows, rows)


def _to_whole(parts: Tensor, pieces: Pieces, peers: ParallelGroup) -> Tensor:
    return joined(_exchanged(parts, peers).flatten(0, 1), pieces)


def _to_parts(whole: Tensor, pieces: Pieces, peers: ParallelGroup) -> Tensor:
    return _exchanged(torch.stack([held(whole, pieces, index=rank) for rank in range(pieces.ranks)]), peers)


class _TokensForHeads(torch.autograd.Function):
    """[C, s/C, ...], this rank's tokens of each rank's heads -> [s, ...], all tokens of its own heads."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, pieces: Pieces, peers: ParallelGroup) -> Tensor:
        ctx.pieces, ctx.peers = pieces, peers
        return _to_whole(parts, pieces, peers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_parts(grads[0], ctx.pieces, ctx.peers), None, None


class _HeadsForTokens(torch.autograd.Function):
    """The inverse: [s, ...] -> [C, s/C, ...]."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, pieces: Pieces, peers: ParallelGroup) -> Tensor:
        ctx.pieces, ctx.peers = pieces, peers
        return _to_parts(whole, pieces, peers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_whole(grads[0], ctx.pieces, ctx.peers), None, None
