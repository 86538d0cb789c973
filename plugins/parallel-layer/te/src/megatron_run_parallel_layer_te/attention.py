"""Core attention with the kernels that Transformer Engine chooses.

Legend: s sequence, b micro batch, n heads, k key-value heads, d head size, t tensor-parallel size, c bounds of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_run_engine.nn.packed_attention import cumulative_lengths

if TYPE_CHECKING:
    from megatron_run.contracts import AttentionShape
    from megatron_run_parallel_layer_te.tools import Tools


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v on this rank's heads; dropout acts on the probabilities while training."""

    #: It keeps to packed documents by itself.
    packs = True

    def __init__(self, tools: Tools, shape: AttentionShape, dropout: float) -> None:
        super().__init__()
        self.module = tools.engine.pytorch.DotProductAttention(
            num_attention_heads=shape.heads,
            kv_channels=shape.head_size,
            num_gqa_groups=shape.kv_heads,
            attention_dropout=dropout,
            qkv_format="sbhd",
            attn_mask_type="causal",
            layer_number=shape.layer + 1,
            **tools.splitting(),
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Query [s, b, n/t, d], key and value [s, b, k/t, d] -> [s, b, n/t * d].

        ``mask`` is boolean, broadcastable to [b, 1, s, s], true where a query may attend; None is causal. A query that
        may attend to no key gets zeros; the library alone would give it the mean of all values. ``documents`` [b, c]
        come without a mask.
        """
        if documents is not None:
            return self._within(documents, query, key, value)
        if mask is None:
            result: Tensor = self.module(query, key, value, attn_mask_type="causal")
            return result
        whole = torch.broadcast_to(mask, (query.shape[1], 1, query.shape[0], key.shape[0]))  # [b, 1, s, s]
        # Transformer Engine's masks are the inverse of ours: true where attention is forbidden.
        masked: Tensor = self.module(query, key, value, attention_mask=~whole, attn_mask_type="arbitrary")
        return masked.masked_fill(~whole.any(-1).permute(2, 0, 1), 0.0)  # [b, 1, s] -> [s, b, 1]

    def _within(self, documents: Tensor, *heads: Tensor) -> Tensor:
        """Causal attention within each document: the library's format of tokens without rows (``thd``)."""
        s, b = heads[0].shape[:2]
        flat = [x.transpose(0, 1).flatten(0, 1) for x in heads]  # [b*s, n/t, d]
        lengths = cumulative_lengths(documents, s)
        found: Tensor = self.module(
            *flat,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            max_seqlen_q=s,
            max_seqlen_kv=s,
        )
        return found.reshape(b, s, -1).transpose(0, 1)
