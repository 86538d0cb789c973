"""The layers of encoder and decoder: norms come first, products are not scaled, no layer has a bias.

Legend: s tokens of a stream, c of the one that keys come from, b micro batch, h hidden, n heads, d head size, t
tensor-parallel size. Streams are [s, b, h], or [s/t, b, h] under sequence parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import Init, LinearPart, LinearSpec, Segment
from megatron_run_engine.nn import Mlp, drops, norm_of, parameters_of, split_heads

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron_run.contracts import ParallelLayers
    from megatron_run_engine.nn import TransformerSpec


class BiasedAttention(nn.Module):
    """softmax(q k^T + bias) v, with dropout of the probabilities, and the output projection."""

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec) -> None:
        super().__init__()
        self.dropout, self.head_size, self.width = spec.dropout, spec.head_size, spec.heads * spec.head_size
        self.output = layers.row_linear(LinearSpec(self.width, spec.hidden, spec.residual_init, bias=False))

    def split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """``parts`` projections by one matrix, [s, b, parts * n/t * d] -> [s, b, n/t, d] each."""
        return split_heads(x, [(x.shape[-1] // parts // self.head_size, self.head_size)] * parts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Query [s, b, n/t, d], key and value [c, b, n/t, d], bias [*, *, s, c] -> [s, b, h]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # Without 1/sqrt(d): initial values make up for it.
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0)
        result: Tensor = self.output(x.permute(2, 0, 1, 3).flatten(2))  # [b, n/t, s, d] -> [s, b, n/t * d]
        return result


class SelfAttention(BiasedAttention):
    """Of a stream with itself.

    One matrix makes queries, keys and values, so all are drawn alike: T5's smaller queries, 1/sqrt(d) times the keys,
    become queries and keys of the same product.
    """

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec) -> None:
        super().__init__(layers, spec)
        parts = tuple(LinearPart(name, self.width) for name in ("query", "key", "value"))
        init = Init("normal", spec.init_std * spec.head_size**-0.25)
        self.qkv = layers.column_linear(LinearSpec(spec.hidden, parts, init, bias=False), norm_of(layers, spec))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        query, key, value = self.split(self.qkv(x), 3)
        return self.attend(query, key, value, bias)


class CrossAttention(BiasedAttention):
    """Of the decoder's stream with the encoder's output."""

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec) -> None:
        super().__init__(layers, spec)
        query, key, value = (LinearPart(name, self.width) for name in ("query", "key", "value"))
        small = Init("normal", spec.init_std * spec.head_size**-0.5)
        self.query = layers.column_linear(LinearSpec(spec.hidden, (query,), small, bias=False), norm_of(layers, spec))
        self.key_value = layers.column_linear(LinearSpec(spec.hidden, (key, value), spec.init, bias=False))

    def forward(self, x: Tensor, encoder: Tensor, bias: Tensor | None) -> Tensor:
        """[s, b, h], encoder [c, b, h] -> [s, b, h]."""
        key, value = self.split(self.key_value(encoder), 2)
        query = self.query(x).unflatten(-1, (-1, self.head_size))
        return self.attend(query, key, value, bias)


class EncoderBlock(nn.Module):
    """Attention both ways, then the feed-forward network; the last one ends with the encoder's norm."""

    stream = "encoder"

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec, layer: int, *, relu: bool, last: bool) -> None:
        super().__init__()
        self.layer, self.draws = layer, spec.dropout > 0
        self.attention = SelfAttention(layers, spec)
        self.mlp = Mlp(layers, spec, spec.ffn, norm=norm_of(layers, spec))
        if relu:
            self.mlp.activation = F.relu
        self.final_norm = norm_of(layers, spec) if last else None
        self.dropout = layers.dropout(spec.dropout)

    def attend(self, x: Tensor, bias: Tensor) -> Tensor:
        """Add the attention half: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(self.attention(x, bias))
        return x + added

    def feed(self, x: Tensor) -> Tensor:
        """Add the feed-forward half: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(self.mlp(x))
        if self.final_norm is None:
            return x + added
        result: Tensor = self.dropout(self.final_norm(x + added))
        return result

    def segments(self) -> tuple[Segment, ...]:
        """Both halves, in order."""
        return (
            self.segment("attn", 0, self.attend, f"{self.stream}_bias", read=(self.attention,)),
            self.segment("mlp", 1, self.feed, read=(self.mlp, self.final_norm)),
        )

    def segment(
        self, name: str, index: int, fn: Callable[..., Tensor], *inputs: str, read: tuple[nn.Module | None, ...]
    ) -> Segment:
        """One that changes the stream by ``inputs``, and whose parameters are those of ``read``."""
        draws = self.draws or drops(*read)
        return Segment(
            name, self.layer, index, fn, (self.stream, *inputs), (self.stream,), parameters_of(*read), draws=draws
        )


class DecoderBlock(EncoderBlock):
    """Causal attention, attention to the encoder's output, then the feed-forward network."""

    stream = "x"

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec, layer: int, *, relu: bool) -> None:
        super().__init__(layers, spec, layer, relu=relu, last=False)
        self.cross = CrossAttention(layers, spec)

    def look(self, x: Tensor, encoder: Tensor, bias: Tensor | None) -> Tensor:
        """Add what is found in the encoder's output [c, b, h]: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(self.cross(x, encoder, bias))
        return x + added

    def segments(self) -> tuple[Segment, ...]:
        """The three parts, in order."""
        attend, feed = super().segments()
        return attend, self.segment("cross_attn", 2, self.look, "encoder", "cross_bias", read=(self.cross,)), feed
