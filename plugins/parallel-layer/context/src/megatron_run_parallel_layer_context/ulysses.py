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
    from collections.abc import Callable

    from megatron_run.contracts import Pieces
    from megatron_run_engine.runtime import ParallelGroup


class UlyssesAttention(nn.Module, AttentionCore):
    """Runs ``base``, a core of 1/C of the heads, on whole samples."""

    pieces = True

    def __init__(self, base: nn.Module, pieces: Pieces, peers: ParallelGroup) -> None:
        super().__init__()
        self.base, self._pieces, self._peers = base, pieces, peers
        able = AttentionCore.of(base)
        self.packs, self.variants, self.tells_scores = able.packs, able.variants, able.tells_scores

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *documents: Tensor
    ) -> Tensor:
        """Query [s/C, b, n, d], key and value [s/C, b, k, d] -> [s/C, b, n*d]; ``mask`` is that of whole samples."""
        attended = self.base(*self._whole(query, key, value), mask, *documents)  # [s, b, n*d/C]
        parts: Tensor = _Exchange.apply(attended, self._to_parts, self._to_whole)  # type: ignore[no-untyped-call]
        return parts.movedim(0, 2).flatten(2)  # [C, s/C, b, n*d/C] -> [s/C, b, n*d]

    def largest_scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Query [s/C, b, n, d], key [s/C, b, k, d] -> [n], of all ranks' queries: tokens travel once more."""
        queries, keys = self._whole(query, key)
        found = AttentionCore.of(self.base).largest_scores(queries, keys, mask, documents)  # [n/C]
        return self._peers.gather(found)

    def _whole(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Each of ``parts`` [s/C, b, heads, d] as all tokens of this rank's heads, [s, b, heads/C, d]."""
        by_rank = [x.unflatten(2, (self._pieces.ranks, -1)) for x in parts]  # [s/C, b, C, heads/C, d]
        heads = torch.cat(by_rank, dim=3).movedim(2, 0)  # [C, s/C, b, (n+2k)/C, d]
        whole: Tensor = _Exchange.apply(heads, self._to_whole, self._to_parts)  # type: ignore[no-untyped-call]  # torch's
        return torch.split(whole, [x.shape[3] for x in by_rank], dim=2)

    def _to_whole(self, parts: Tensor) -> Tensor:
        """[C, s/C, ...], this rank's tokens of each rank's heads -> [s, ...], all tokens of its own heads."""
        return joined(self._exchanged(parts).flatten(0, 1), self._pieces)

    def _to_parts(self, whole: Tensor) -> Tensor:
        """The inverse: [s, ...] -> [C, s/C, ...]."""
        pieces = self._pieces
        return self._exchanged(torch.stack([held(whole, pieces, index=rank) for rank in range(pieces.ranks)]))

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Part r of ``parts`` [C, ...] goes to peer r, whose part for this rank comes in its place."""
        rows = [1] * self._peers.size
        return self._peers.exchange(parts.contiguous(), rows, rows)


class _Exchange(torch.autograd.Function):
    """Exchanges by ``there``; gradients go by ``back``, its inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None
