"""Causal self-attention (Vaswani et al. 2017) with grouped key-value heads (Ainslie et al. 2023).

Legend: s sequence, b micro batch, h hidden, n heads, k key-value heads, d head size, t tensor-parallel size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import AttentionShape, LinearPart
from megatron_run_engine.nn.packed_attention import attend_by_lengths, attend_by_spans, fused_varlen, within_documents
from megatron_run_engine.nn.parameter import build_device
from megatron_run_engine.runtime.recompute import recomputed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.contracts import Decoding, ParallelLayers
    from megatron_run_engine.nn.spec import TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext


class SelfAttention(nn.Module):
    """Norm, fused query-key-value projection, attention core and output projection."""

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec, layer: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.head_size, self.layer = spec.head_size, layer
        width, kv_width = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        parts = (LinearPart("query", width), LinearPart("key", kv_width), LinearPart("value", kv_width))
        self.features = [part.features for part in parts]
        shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_size, layer)
        # Built before qkv: a factory that cannot split the heads then reports heads, not features of the projection.
        self.core = layers.core_attention(shape, spec.dropout)
        norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps)
        self.qkv = layers.column_linear(spec.hidden, parts, bias=spec.bias, init=spec.init, norm=norm)
        self.rotary = rotary
        self.output = layers.row_linear(width, spec.hidden, bias=spec.bias, init=spec.residual_init)
        self._core_draws: Sequence[torch.Generator] | None = None

    def recompute_core(self, streams: Sequence[torch.Generator]) -> None:
        """From now on recompute the core alone in the backward. It may draw from ``streams``.

        It keeps query, key and value and repeats few operations; without it, it keeps s x s values for each head, the
        term 5 a s^2 b of Korthikanti et al. 2022, equation 1 (section 5 calls this selective recomputation).
        """
        self._core_draws = streams

    def forward(
        self,
        x: Tensor,
        decoding: Decoding | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; between blocks s is s/t under sequence parallelism.

        With ``decoding`` the keys and values of earlier columns come from this layer's :class:`KeyValueCache`. With
        ``documents`` [b, d], the bounds of packed documents, attention stays within them; ``positions`` [b, s] are
        those of all ranks' tokens.
        """
        fused = self.qkv(x)  # [s, b, (n + 2k) * d / t]
        split = sum(self.features) // fused.shape[-1]  # t, read from the result: the factory decides how to split
        heads = [features // split // self.head_size for features in self.features]
        every = fused.unflatten(-1, (-1, self.head_size))  # [s, b, (n + 2k) / t, d]
        query, key, value = every.split(heads, dim=2)
        if self.rotary is not None:  # queries and keys together: half the kernels
            query, key = self.rotary(every[:, :, : -heads[2]], decoding, positions).split(heads[:2], dim=2)
        mask, packed = None, cast("tuple[Tensor, ...]", ())
        if decoding is not None and decoding.caches is not None:
            mask, cache = decoding.mask, decoding.caches.get(self.layer)
            if cache is None:
                cache = decoding.caches[self.layer] = KeyValueCache(key)
            key, value = cache.extend(key, value, decoding.first)
        elif documents is not None and getattr(self.core, "packs", False):
            packed = (documents,)
        elif documents is not None:
            mask = within_documents(documents, len(query))
        if self._core_draws is None or not (self.training and torch.is_grad_enabled()):
            attended: Tensor = self.core(query, key, value, mask, *packed)  # [s, b, n/t * d]
        else:
            attended = recomputed(self.core, (query, key, value, mask, *packed), self._core_draws)
        result: Tensor = self.output(attended)  # [s, b, h]
        return result


class KeyValueCache:
    """The keys and values of the columns that were read; sizes and type are those of ``key`` [s, b, k, d].

    One buffer [b, k, room, d] each, in which a query finds each head's keys in a row. It doubles when it is full.
    """

    def __init__(self, key: Tensor) -> None:
        _, b, k, d = key.shape
        self._keys, self._values = key.new_empty(b, k, 0, d), key.new_empty(b, k, 0, d)

    def extend(self, key: Tensor, value: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Write key and value [s, b, k, d] from column ``first`` on; return those of all columns [c, b, k, d]."""
        stop = first + len(key)
        if stop > self._keys.shape[2]:
            self._keys, self._values = (self._grown(buffer, first, 2 * stop) for buffer in (self._keys, self._values))
        for buffer, new in ((self._keys, key), (self._values, value)):
            buffer[:, :, first:stop] = new.permute(1, 2, 0, 3)  # [s, b, k, d] -> [b, k, s, d]
        return self._keys[:, :, :stop].permute(2, 0, 1, 3), self._values[:, :, :stop].permute(2, 0, 1, 3)

    def _grown(self, buffer: Tensor, columns: int, room: int) -> Tensor:
        grown = buffer.new_empty(*buffer.shape[:2], room, buffer.shape[3])
        grown[:, :, :columns] = buffer[:, :, :columns]
        return grown

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but ``rows`` [r], which become the first r."""
        self._keys, self._values = self._keys[rows], self._values[rows]


#: Queries per block of scores: small enough that a block skips most of the keys that the causal mask hides from it.
BLOCK = 128


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v by the faster of two implementations; dropout acts on the probabilities."""

    #: It takes more keys than queries: those of earlier tokens.
    caches = True
    #: It keeps to packed documents by itself.
    packs = True

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Query [s, b, n, d], key and value [c, b, k, d] with c >= s -> [s, b, n*d].

        ``mask`` is boolean and broadcasts to [b, 1, s, c]: true where a query may attend. None means causal: the last
        query sees all keys. A query that may attend to no key gets zeros. ``documents`` [b, d] are the bounds of those
        of a row, within which attention is causal; they come without a mask.
        """
        if len(key) > len(query):
            return fused_attention(query, key, value, _later_causal(query, key) if mask is None else mask, 0.0)
        dropout = self.dropout if self.training else 0.0
        if documents is None:
            return _faster(query, key, value, mask, dropout)
        if query.device.type == "cpu":
            return attend_by_spans(query, key, value, documents, partial(_faster, dropout=dropout))
        if fused_varlen(query) and not dropout:
            return attend_by_lengths(query, key, value, documents)
        return fused_attention(query, key, value, within_documents(documents, len(query)), dropout)


def _faster(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    attend = matmul_attention if matmuls_are_faster(query, dropout) else fused_attention
    return attend(query, key, value, mask, dropout)


def _later_causal(query: Tensor, key: Tensor) -> Tensor | None:
    """The causal mask [s, c] of the last s of c tokens; None for one query, which sees all keys."""
    s, c = len(query), len(key)
    return None if s == 1 else torch.ones(s, c, dtype=torch.bool, device=query.device).tril(c - s)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """PyTorch's attention, one kernel where the backend has one; arguments as in :meth:`CoreAttention.forward`."""
    groups = query.shape[2] // key.shape[2]
    if len(query) == 1 < groups and not dropout:
        # Queries of one token that share keys are rows of one product: each key is read once.
        rows = query[0].unflatten(1, (-1, groups))  # [b, k, g, d]
        key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)  # [b, k, c, d]
        return F.scaled_dot_product_attention(rows, key, value, attn_mask=mask).flatten(1)[None]  # [1, b, n*d]
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, n, d] -> [b, n, s, d]
    x = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and query.shape[2] == key.shape[2],
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return x.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n*d]


def matmul_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Two batched matrix products with a softmax between them; arguments as in :meth:`CoreAttention.forward`.

    The query heads that share a key-value head become rows of one product. Under the causal mask, each block of queries
    is multiplied only with the keys up to the block's end. Scores of 16-bit operands are rounded to 16 bits, as in
    Megatron-LM; the softmax computes in fp32.
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
        x = x.masked_fill(hidden.all(-1, keepdim=True), 0.0)  # [b, 1, s, 1]: queries that may attend to no key
    return x.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n*d]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Queries [b*k, g, r, d], keys and values [b*k, c, d] -> [b*k, g, r, d].

    ``bias`` [b*k or 1, 1, r, c] is added to the scores: 0 for visible keys, the most negative finite number for hidden
    ones. It is finite because a row of -inf would make the softmax return NaN.
    """
    batch, groups, rows, d = queries.shape
    bias = bias.expand(-1, groups, -1, -1).flatten(1, 2)
    scores = torch.baddbmm(bias, queries.flatten(1, 2), keys.transpose(1, 2), alpha=d**-0.5)  # [b*k, g*r, c]
    probabilities = F.dropout(scores.softmax(-1), dropout)
    return torch.bmm(probabilities, values).view(batch, groups, rows, d)


def _causal_bias(query: Tensor, start: int, stop: int) -> Tensor:
    """Bias for queries ``start`` to ``stop`` - 1 and the keys before ``stop``: [1, 1, r, c]."""
    return query.new_full((1, 1, stop - start, stop), torch.finfo(query.dtype).min).triu_(start + 1)


def matmuls_are_faster(query: Tensor, dropout: float) -> bool:
    """Whether :func:`matmul_attention` beats the fused kernel, as ``benchmarks.single --only attention`` measured.

    On a CPU with PyTorch 2.13, matrix products are up to twice as fast in bf16 and slightly faster in fp32; fp16 has no
    fast products there. They keep the probabilities for the backward, s x s values per head. The fused CPU kernel keeps
    none, but it does not support dropout and PyTorch then falls back to code that keeps them too. Without dropout the
    products are therefore used only for ``s <= 8 d``, where the probabilities add about a quarter to the layer's other
    saved activations (Korthikanti et al. 2022, section 4).
    """
    fast = query.device.type == "cpu" and query.dtype in (torch.float32, torch.bfloat16)
    return fast and (dropout > 0 or len(query) <= 8 * query.shape[-1])


class Rotary(nn.Module):
    """Rotary embedding: rotates the features of position ``i`` by ``i * theta^(-2j/d)``; layers share one table.

    (Su et al. 2021, "RoFormer".) Feature j is paired with feature j + d/2, as in GPT-NeoX and Llama.
    """

    cos: Tensor  # [s, 1, 1, d/2]
    sin: Tensor  # [s, 1, 1, d/2]

    def __init__(self, context: BuildContext, spec: TransformerSpec) -> None:
        super().__init__()
        device = build_device(context)
        # float64: at long positions fp32 angles lose the digits that distinguish neighbours.
        exponents = torch.arange(0, spec.head_size, 2, dtype=torch.float64, device=device) / spec.head_size
        positions = torch.arange(spec.sequence_length, dtype=torch.float64, device=device)
        angles = torch.outer(positions, spec.rope_theta**-exponents)[:, None, None, :]
        self.register_buffer("cos", angles.cos().to(context.dtypes.param), persistent=False)
        self.register_buffer("sin", angles.sin().to(context.dtypes.param), persistent=False)

    def forward(self, x: Tensor, decoding: Decoding | None = None, positions: Tensor | None = None) -> Tensor:
        """Rotate queries or keys: [s, b, n, d] -> [s, b, n, d]; by default token i is at position i."""
        positions = positions if decoding is None else decoding.positions
        if positions is not None:
            places = positions.t()  # [s, b]
            cos, sin = self.cos[places, 0], self.sin[places, 0]  # [s, b, 1, d/2]
        else:
            start = 0 if decoding is None else decoding.first
            cos, sin = self.cos[start : start + len(x)], self.sin[start : start + len(x)]
        first, second = x.chunk(2, dim=-1)  # each [s, b, n, d/2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
