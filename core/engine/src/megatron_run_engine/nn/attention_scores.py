"""Scores of heads: the largest of each, by products of their own, and the rows of weights that make them.

Whatever computes the attention keeps no scores.

Legend: s sequence, b micro batch, n heads, k key-value heads, g = n / k heads that share keys, d head size, r queries
of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

#: Queries whose scores are in memory at once.
BLOCK = 128


class HeadRows(NamedTuple):
    """The rows of ``part`` of ``layer``, head after head; ``powers`` are the exponents of a head's rows."""

    layer: nn.Module
    part: str
    powers: tuple[float, ...]


def largest_scores(query: Tensor, key: Tensor, seen: Tensor | None = None, scale: float | None = None) -> Tensor:
    """The largest product of each head's queries with the keys that they see, times ``scale``: [n], at least fp32.

    Query [s, b, n, d] and key [s, b, k, d]. ``seen`` is boolean and broadcasts to [b, 1, s, s]; None: causal. Without
    ``scale`` it is 1/sqrt(d). Products have the type of the operands, whose largest number bounds the result.
    """
    (s, b, n, d), k = query.shape, key.shape[2]
    queries = query * (d**-0.5 if scale is None else scale)
    queries = queries.permute(1, 2, 0, 3).unflatten(1, (k, -1))  # [s, b, n, d] -> [b, k, g, s, d]
    across = key.permute(1, 2, 3, 0)  # [s, b, k, d] -> [b, k, d, s]
    seen = torch.ones(s, s, dtype=torch.bool, device=query.device).tril_() if seen is None else seen
    hidden = ~seen.expand(b, 1, s, s)[:, :, None]  # [b, 1, 1, s, s]
    wide = torch.promote_types(query.dtype, torch.float32)
    found = torch.full((n,), -torch.inf, dtype=wide, device=query.device)
    for start in range(0, s, BLOCK):
        rows = slice(start, start + BLOCK)
        scores = (queries[:, :, :, rows].flatten(2, 3) @ across).unflatten(2, (n // k, -1))  # [b, k, g, r, s]
        largest = scores.masked_fill(hidden[:, :, :, rows], -torch.inf).amax((0, 3, 4)).flatten()
        found = torch.maximum(found, largest.clamp(max=torch.finfo(query.dtype).max))
    return found
