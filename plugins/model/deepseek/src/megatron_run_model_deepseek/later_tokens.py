"""Ids of tokens some places further on, and whether they count.

Legend: s tokens of a sample, C context-parallel ranks, b micro batch, c bounds of a row's documents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run_engine.runtime import gathered, held

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.runtime import BuildContext


class LaterTokens:
    """Reads fields [b, s/C] some places ahead, where other context-parallel ranks may hold them. Collective."""

    def __init__(self, context: BuildContext) -> None:
        self._pieces, self._peers = context.pieces, context.groups.parallel_group(context.topology, "context")

    def ahead(self, x: Tensor, places: int) -> Tensor:
        """``x`` [b, s/C] of the token so many places later; zeros behind the end."""
        return held(_ahead(self._whole(x), places), self._pieces, 1) if places else x

    def counted(self, loss_mask: Tensor, depth: int, *documents: Tensor | None) -> Tensor:
        """1 where a position counts at ``depth``: [b, s/C].

        The token that it predicts must count and, of packed rows, whose bounds are ``documents`` [b, c], the token that
        it has been given must be of the same document.
        """
        counts = _ahead(self._whole(loss_mask), depth)
        for bounds in documents:
            if bounds is not None:
                counts = counts * _same_document(bounds, counts.shape[1], depth)
        return held(counts, self._pieces, 1)

    def mean(self, total: Tensor, weight: Tensor) -> Tensor:
        """A loss whose mean over the ranks is that over all that count; this one adds ``total`` and ``weight``."""
        return total * self._peers.size / self._peers.sum_(weight.detach().clone()).clamp(min=1)

    def _whole(self, x: Tensor) -> Tensor:
        return gathered(x, self._pieces, self._peers, 1)


def _ahead(x: Tensor, places: int) -> Tensor:
    """``x`` [b, s] of the token so many places later; zeros behind the end."""
    return torch.cat((x[:, places:], x.new_zeros(len(x), min(places, x.shape[1]))), dim=1)


def _same_document(bounds: Tensor, length: int, places: int) -> Tensor:
    """1 where a token and the one so many places later are of one document: bounds [b, c] -> [b, s]."""
    columns = torch.arange(length + places, device=bounds.device).expand(len(bounds), -1).contiguous()
    index = torch.searchsorted(bounds, columns, right=True)
    return index[:, :length] == index[:, places:]
