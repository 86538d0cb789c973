"""The core of attention: softmax(q k^T / sqrt(d)) v, on the heads that this rank has.

Legend: s sequence, b micro batch, n heads, k key-value heads, d head size.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class CoreAttention(nn.Module):
    """Fused softmax(q k^T / sqrt(d)) v; dropout acts on the probabilities while training."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Query [s, b, n, d], key and value [s, b, k, d] -> [s, b, n*d].

        ``mask`` is boolean, [b, 1, s, s] or what broadcasts to it, true where a query may look; None is causal.
        """
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, n, d] -> [b, n, s, d]
        x = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return x.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n*d]
