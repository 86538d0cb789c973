"""Causal attention written out over whole samples in float64: the reference, sharing no code with any layer.

Legend: s tokens of a sample, b micro batch, n heads, k key-value heads, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_run.contracts import AttentionShape


def probabilities(query: Tensor, key: Tensor, shape: AttentionShape, bounds: Tensor | None = None) -> Tensor:
    """Query [s, b, n, d], key [s, b, k, d], bounds of documents [b, any] -> [b, n, s, s]."""
    key = key.repeat_interleave(shape.heads // shape.kv_heads, 2)
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * (shape.scale or shape.head_size**-0.5)
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    column = torch.arange(len(key))
    seen = column <= column[:, None]
    if shape.window is not None:
        seen = seen & (column > column[:, None] - shape.window)
    if bounds is not None:
        number = (bounds[:, None] <= column[:, None]).sum(-1)  # of the document of each token: [b, s]
        seen = (seen & (number[:, :, None] == number[:, None]))[:, None]
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def attended(weights: Tensor, value: Tensor) -> Tensor:
    """Weights [b, n, s, s] of values [s, b, k, d] -> [s, b, n*d]."""
    value = value.repeat_interleave(weights.shape[1] // value.shape[2], 2)
    return torch.einsum("bnqk,kbnd->qbnd", weights, value).flatten(2)
