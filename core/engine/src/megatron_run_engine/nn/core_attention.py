"""The core of attention: softmax(q k^T / sqrt(d)) v, on the heads that this rank has.

Legend: s sequence, b micro batch, n heads, k key-value heads, g = n/k heads that share one, d head size; r queries of
a block, c keys that they may see.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Queries whose scores are computed at once: small enough to skip much of what a causal mask hides.
BLOCK = 128


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v by the faster of two ways; dropout acts on the probabilities while training."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Query [s, b, n, d], key and value [s, b, k, d] -> [s, b, n*d].

        ``mask`` is boolean, [b, 1, s, s] or what broadcasts to it, true where a query may look; None is causal. A query
        that may look nowhere gets zeros.
        """
        dropout = self.dropout if self.training else 0.0
        attend = matmul_attention if matmuls_are_faster(query, dropout) else fused_attention
        return attend(query, key, value, mask, dropout)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """PyTorch's, in one kernel where it has one: arguments as :meth:`CoreAttention.forward`."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, n, d] -> [b, n, s, d]
    x = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return x.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n*d]


def matmul_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Batched matrix products with a softmax between them: arguments as :meth:`CoreAttention.forward`.

    The heads that share a key-value head are rows of one product. Without a mask a block of queries is multiplied with
    the keys up to its end only. Of 16-bit operands the scores are rounded to 16 bits, as Megatron's are; the softmax
    computes in fp32.
    """
    (s, b, n, d), k = query.shape, key.shape[2]
    queries = query.permute(1, 2, 0, 3).reshape(b * k, n // k, s, d)  # [s, b, n, d] -> [b*k, g, s, d]
    keys, values = (x.permute(1, 2, 0, 3).reshape(b * k, s, d) for x in (key, value))  # [s, b, k, d] -> [b*k, s, d]
    if mask is None:
        stops = [(start, min(start + BLOCK, s)) for start in range(0, s, BLOCK)]
        blocks = [
            _attend(
                queries[:, :, start:stop], keys[:, :stop], values[:, :stop], _causal_bias(query, start, stop), dropout
            )
            for start, stop in stops
        ]
        x = torch.cat(blocks, dim=2).view(b, n, s, d)
    else:
        hidden = ~mask.expand(b, 1, s, s)
        bias = query.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(query.dtype).min)  # [b, 1, s, s]
        x = _attend(queries, keys, values, bias.expand(b, k, s, s).reshape(b * k, 1, s, s), dropout).view(b, n, s, d)
        x = x.masked_fill(hidden.all(-1, keepdim=True), 0.0)  # [b, 1, s, 1]: queries that may look nowhere
    return x.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n*d]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Queries [b*k, g, r, d], keys and values [b*k, c, d] -> [b*k, g, r, d].

    ``bias`` [b*k or 1, 1, r, c] is added to the scores: 0, and the least number where a query may not look. It is
    finite, so that a query that may look nowhere gets numbers and not NaN.
    """
    batch, groups, rows, d = queries.shape
    bias = bias.expand(-1, groups, -1, -1).flatten(1, 2)
    scores = torch.baddbmm(bias, queries.flatten(1, 2), keys.transpose(1, 2), alpha=d**-0.5)  # [b*k, g*r, c]
    probabilities = F.dropout(scores.softmax(-1), dropout)
    return torch.bmm(probabilities, values).view(batch, groups, rows, d)


def _causal_bias(query: Tensor, start: int, stop: int) -> Tensor:
    """Of the queries from ``start`` to ``stop`` - 1 and the keys before ``stop``: [1, 1, r, c]."""
    return query.new_full((1, 1, stop - start, stop), torch.finfo(query.dtype).min).triu_(start + 1)


def matmuls_are_faster(query: Tensor, dropout: float) -> bool:
    """Whether to compute by matrix products: what ``python -m benchmarks.single --only attention`` measured.

    On a CPU they are, by PyTorch 2.13: up to twice as fast in bf16, a little faster in fp32; of fp16 it has no fast
    products there. They keep the probabilities for the backward, s x s values a head, and the fused kernel does not,
    unless there is dropout, which that kernel does not know. Without dropout they are taken for ``s <= 8 d``: the
    probabilities then add about a quarter to what a layer keeps besides (Korthikanti et al. 2022, section 4).
    """
    fast = query.device.type == "cpu" and query.dtype in (torch.float32, torch.bfloat16)
    return fast and (dropout > 0 or len(query) <= 8 * query.shape[-1])
