"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

Keys and values of all heads are made from one small latent vector per token, queries from another. Rotations do not
pass through the latent's matrices, so the features that rotate come beside it: one key for all heads.

Legend: s sequence, b micro batch, h hidden, n heads, t tensor-parallel size, r features that rotate, p those that do
not, v value features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import AttentionShape, LinearPart, LinearSpec
from megatron_run.contracts.costs import AttentionCosts
from megatron_run_engine.nn import Attention, HeadRows, ReplicatedLinear, split_heads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_run.contracts import Decoding, ParallelLayers
    from megatron_run_engine.nn import Rotary, TransformerSpec
    from megatron_run_engine.runtime import BuildContext


@dataclass(frozen=True)
class LatentShape:
    """Features of the latent of keys and values, of that of queries (None: there is none), and of a head's parts."""

    kv_rank: int
    query_rank: int | None
    rope: int
    nope: int
    value: int

    @property
    def head(self) -> int:
        """Features of a query or key head."""
        return self.rope + self.nope

    def costs(self, hidden: int, heads: int) -> AttentionCosts:
        """The costs of one layer's attention; a head's values have a size of their own."""
        query = hidden * heads * self.head
        if self.query_rank is not None:
            query = self.query_rank * (hidden + heads * self.head)
        weights = query + hidden * (self.kv_rank + self.rope) + self.kv_rank * heads * (self.nope + self.value)
        return AttentionCosts(heads, (self.head + self.value) / 2, weights / hidden, heads * self.value, heads)


class LatentAttention(Attention):
    """Norm, the way through the latents, attention core and output projection.

    Every tensor-parallel rank makes whole latents of its tokens, and from them the queries, keys and values of its
    heads. A head's features that rotate come first. Values are padded to the size of keys, which any core takes.
    """

    def __init__(
        self,
        context: BuildContext,
        layers: ParallelLayers,
        spec: TransformerSpec,
        shape: LatentShape,
        layer: int,
        rotary: Rotary | None,
    ) -> None:
        heads = AttentionShape(spec.heads, spec.heads, shape.head, layer, scale=spec.scale)
        super().__init__(layers, heads, spec.dropout)
        self.shape, self.rotary, self._enter = shape, rotary, layers.enter_region
        self.norm = layers.norm("rmsnorm", spec.hidden, spec.norm_eps)

        def up(rank: int, *parts: LinearPart) -> nn.Module:
            norm = layers.norm("rmsnorm", rank, spec.norm_eps)
            return layers.column_linear(LinearSpec(rank, parts, spec.init, bias=False), norm)

        queries = LinearPart("query", spec.heads * shape.head)
        self.query_down: ReplicatedLinear | None = None
        if shape.query_rank is None:
            self.query = layers.column_linear(LinearSpec(spec.hidden, (queries,), spec.init, bias=False))
        else:
            self.query_down = ReplicatedLinear(context, spec.hidden, shape.query_rank, spec.init)
            self.query = up(shape.query_rank, queries)
        self.latent = ReplicatedLinear(context, spec.hidden, shape.kv_rank + shape.rope, spec.init)
        keys, values = spec.heads * shape.nope, spec.heads * shape.value
        self.key_value = up(shape.kv_rank, LinearPart("key", keys), LinearPart("value", values))
        self.output = layers.row_linear(LinearSpec(values, spec.hidden, spec.residual_init, bias=False))

    def head_rows(self) -> Iterator[HeadRows]:
        """The key that rotates is one for all heads and stays: there the queries shrink alone."""
        shape = self.shape
        yield HeadRows(self.query, "query", (1.0,) * shape.rope + (0.5,) * shape.nope)
        yield HeadRows(self.key_value, "key", (0.5,) * shape.nope)

    def forward(
        self,
        x: Tensor,
        decoding: Decoding | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; arguments as of :class:`megatron_run_engine.nn.SelfAttention`."""
        assert self.rotary is not None, "the options say position=rope"
        shape, y = self.shape, self.norm(x)
        query = self.query(y if self.query_down is None else self.query_down(y)).unflatten(-1, (-1, shape.head))
        latent, turned = split_heads(self.latent(y), ((1, shape.kv_rank), (1, shape.rope)))  # [s, b, 1, *]
        turned = self.rotary(self._enter(turned[:, :, 0])[:, :, None], decoding, positions)  # [s, b, 1, r]
        both = self.key_value(latent[:, :, 0])  # [s, b, n/t * (p + v)]
        heads = both.shape[-1] // (shape.nope + shape.value)
        key, value = split_heads(both, ((heads, shape.nope), (heads, shape.value)))
        key = torch.cat((turned.expand(-1, -1, heads, -1), key), dim=-1)
        value = F.pad(value, (0, shape.head - shape.value))
        query = self.rotary(query, decoding, positions)
        attended = self.attend(query, key, value, decoding, documents)  # [s, b, n/t * (r + p)]
        result: Tensor = self.output(attended.unflatten(-1, (heads, -1))[..., : shape.value].flatten(2))
        return result
