"""Causal self-attention (Vaswani et al. 2017) with grouped key-value heads (Ainslie et al. 2023).

Legend: s sequence, b micro batch, h hidden, n heads, k key-value heads, d head size, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_run.contracts import AttentionShape, LinearPart

if TYPE_CHECKING:
    from megatron_run.contracts import ParallelLayers
    from megatron_run_engine.nn.rotary import Rotary
    from megatron_run_engine.nn.spec import TransformerSpec


class SelfAttention(nn.Module):
    """The norm, query, key and value in one matrix product, the fused core, and the output projection."""

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec, layer: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.head_size = spec.head_size
        width, kv_width = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        parts = (LinearPart("query", width), LinearPart("key", kv_width), LinearPart("value", kv_width))
        self.features = [part.features for part in parts]
        shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_size, layer)
        self.core = layers.core_attention(shape, spec.dropout)  # first: who cannot split the heads speaks of heads
        norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps)
        self.qkv = layers.column_linear(spec.hidden, parts, bias=spec.bias, init=spec.init, norm=norm)
        self.rotary = rotary
        self.output = layers.row_linear(width, spec.hidden, bias=spec.bias, init=spec.residual_init)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; between blocks s is s/t under sequence parallelism."""
        fused = self.qkv(x)  # [s, b, (n + 2k) * d / t]
        split = sum(self.features) // fused.shape[-1]  # t, whoever made the layer
        pieces = fused.split([features // split for features in self.features], dim=-1)
        query, key, value = (piece.unflatten(-1, (-1, self.head_size)) for piece in pieces)  # [s, b, n or k / t, d]
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        result: Tensor = self.output(self.core(query, key, value, None))  # [s, b, n/t * d] -> [s, b, h]
        return result
