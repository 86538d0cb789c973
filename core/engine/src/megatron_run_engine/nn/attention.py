"""Self-attention, causal or not (Vaswani et al. 2017) with grouped key-value heads (Ainslie et al. 2023).

Legend: s sequence, b micro batch, h hidden, n heads, k key-value heads, d head size, t tensor-parallel size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import AttentionCore, AttentionShape, LinearPart, LinearSpec
from megatron_run.contracts.parallel_layer import VARIANTS
from megatron_run.errors import InputError
from megatron_run_engine.nn.attention_scores import HeadRows, largest_scores
from megatron_run_engine.nn.device import on_cpu, stands_for_gpu
from megatron_run_engine.nn.fused import split_heads
from megatron_run_engine.nn.key_value_cache import KeyValueCache
from megatron_run_engine.nn.norm import norm_of, qk_norms
from megatron_run_engine.nn.packed_attention import (
    attend_by_lengths,
    attend_by_spans,
    both_ways,
    fused_varlen,
    within_documents,
)
from megatron_run_engine.runtime.gates import in_backward
from megatron_run_engine.runtime.recompute import recomputed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from megatron_run.contracts import Decoding, ParallelLayers
    from megatron_run_engine.nn.rotary import Rotary
    from megatron_run_engine.nn.spec import TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.metrics import Meter


class Attention(nn.Module):
    """A layer's attention: derived classes make queries, keys and values, and map what the core makes of them.

    Their ``forward`` has the arguments of that of :class:`SelfAttention`. Raises :class:`InputError` for a ``shape``
    with variants that the core of these ``layers`` does not support.
    """

    #: Whether a token sees only those before it; else it sees its whole document, and padding is one.
    causal = True

    def __init__(self, layers: ParallelLayers, shape: AttentionShape, dropout: float) -> None:
        super().__init__()
        self.core, self.layer = layers.core_attention(shape, dropout), shape.layer
        _check_variants(shape, self.core)
        self._core_draws: Sequence[torch.Generator] | None = None
        self._peaks: Tensor | None = None
        #: Why the segment with it runs eagerly; empty if it may be captured.
        self.why_eager = ""

    def head_rows(self) -> Iterable[HeadRows]:
        """The rows of parameters that make queries and keys. Raises :class:`InputError` where they may not shrink."""
        raise InputError(
            f"{type(self).__name__} has no model.attention.qk_clip", fix="leave it out, or choose --plugin model=gpt"
        )

    def watch_scores(self, peaks: Tensor, meter: Meter) -> None:
        """From now on keep the largest score of each head in ``peaks`` [n/t] while the model trains.

        ``meter`` gets the largest of a microbatch. Raises :class:`InputError` where the core does not tell its scores.
        """
        if not AttentionCore.of(self.core).tells_scores:
            raise InputError(
                f"model.attention.qk_clip needs the largest scores, which {type(self.core).__name__} does not tell",
                fix="choose --plugin parallel-layer=tensor, or dense on one rank",
            )
        self._peaks, self._meter = peaks, meter
        self.why_eager = "model.attention.qk_clip keeps the largest scores of a step, and a capture computes others"

    def recompute_core(self, streams: Sequence[torch.Generator]) -> None:
        """From now on recompute the core alone in the backward. It may draw from ``streams``.

        It keeps query, key and value and repeats few operations; without it, it keeps s x s values for each head, the
        term 5 a s^2 b of Korthikanti et al. 2022, equation 1 (section 5 calls this selective recomputation).
        """
        self._core_draws = streams

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, decoding: Decoding | None, documents: Tensor | None
    ) -> Tensor:
        """Query [s, b, n/t, d], key and value [s, b, k/t, d] -> [s, b, n/t * d], by the core.

        With ``decoding`` the keys and values of earlier columns come from this layer's :class:`KeyValueCache`. With
        ``documents`` [b, d], the bounds of packed documents, attention stays within them.
        """
        mask, packed = None, cast("tuple[Tensor, ...]", ())
        if decoding is not None and decoding.caches is not None:
            mask, cache = decoding.mask, decoding.caches.get(self.layer)
            if cache is None:
                cache = decoding.caches[self.layer] = KeyValueCache(key)
            key, value = cache.extend(key, value, decoding.first)
        elif not self.causal:
            mask = both_ways(documents, len(query), query.shape[1], query.device)
        elif documents is not None and AttentionCore.of(self.core).packs:
            packed = (documents,)
        elif documents is not None:
            mask = within_documents(documents, len(query))
        if self._peaks is not None and self.training and decoding is None and not in_backward():
            with torch.no_grad():
                found = AttentionCore.of(self.core).largest_scores(query, key, mask, *packed)
                self._peaks.copy_(torch.maximum(self._peaks, found))
                self._meter.add(found.max())
        if self._core_draws is None or not (self.training and torch.is_grad_enabled()):
            attended: Tensor = self.core(query, key, value, mask, *packed)
        else:
            attended = recomputed(self.core, (query, key, value, mask, *packed), self._core_draws)
        return attended


class SelfAttention(Attention):
    """Norm, fused query-key-value projection, attention core and output projection."""

    def __init__(
        self,
        context: BuildContext,
        layers: ParallelLayers,
        spec: TransformerSpec,
        layer: int,
        rotary: Rotary | None,
    ) -> None:
        width, kv_width = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        parts = (LinearPart("query", width), LinearPart("key", kv_width), LinearPart("value", kv_width))
        window = spec.window_of(layer)
        shape = AttentionShape(
            spec.heads, spec.kv_heads, spec.head_size, layer, scale=spec.scale, window=window, softcap=spec.softcap
        )
        # Built before qkv: a factory that cannot split the heads then reports heads, not features of the projection.
        super().__init__(layers, shape, spec.dropout)
        self.causal = spec.causal
        self.head_size, self.features = spec.head_size, [part.features for part in parts]
        norm = norm_of(layers, spec) if spec.norms_first else None
        bias = spec.bias if spec.qkv_bias is None else spec.qkv_bias
        self.qkv = layers.column_linear(LinearSpec(spec.hidden, parts, spec.init, bias=bias), norm)
        self.qk_norm = qk_norms(context, layers, spec)
        self.rotary = rotary
        self.output = layers.row_linear(LinearSpec(width, spec.hidden, spec.residual_init, bias=spec.bias))

    def forward(
        self,
        x: Tensor,
        decoding: Decoding | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; between blocks s is s/t under sequence parallelism.

        ``decoding`` and ``documents`` as of :meth:`attend`; ``positions`` [b, s] are those of all ranks' tokens.
        """
        query, key, value = self._heads(self.qkv(x), decoding, positions)
        result: Tensor = self.output(self.attend(query, key, value, decoding, documents))  # [s, b, h]
        return result

    def _heads(self, fused: Tensor, decoding: Decoding | None, positions: Tensor | None) -> tuple[Tensor, ...]:
        """The projection [s, b, (n + 2k) * d / t] -> query [s, b, n/t, d], key and value [s, b, k/t, d]."""
        split = sum(self.features) // fused.shape[-1]  # t, read from the result: the factory decides how to split
        queries, keys, values = ((features // split // self.head_size, self.head_size) for features in self.features)
        if self.rotary is None or self.qk_norm is not None:
            query, key, value = split_heads(fused, (queries, keys, values))
            if self.qk_norm is not None:
                query, key = self.qk_norm(query, key)
            if self.rotary is None:
                return query, key, value
            both = torch.cat((query, key), dim=2)
        else:
            both, value = split_heads(fused, ((queries[0] + keys[0], self.head_size), values))
        both = self.rotary(both, decoding, positions)  # queries and keys together: half the kernels
        query, key = split_heads(both.flatten(2), (queries, keys))
        return query, key, value

    def head_rows(self) -> Iterable[HeadRows]:
        """Both share the shrinking."""
        powers = (0.5,) * self.head_size
        return HeadRows(self.qkv, "query", powers), HeadRows(self.qkv, "key", powers)


def _check_variants(shape: AttentionShape, core: nn.Module) -> None:
    """Raise :class:`InputError` unless ``core`` names each of the variants that ``shape`` asks for."""
    lacking = sorted(shape.variants - AttentionCore.of(core).variants)
    if lacking:
        keys = " and no ".join(f"model.attention.{name}" for name in lacking)
        raise InputError(
            f"the attention of these parallel layers has no {keys}",
            fix="choose --plugin parallel-layer=tensor, or dense on one rank",
        )


#: Queries per block of scores: small enough that a block skips most of the keys that the causal mask hides from it.
BLOCK = 128


class Variant(NamedTuple):
    """The differences from softmax(q k^T / sqrt(d)) v: the fields of :class:`AttentionShape` with these names."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


PLAIN = Variant()


class CoreAttention(nn.Module, AttentionCore):
    """softmax(q k^T / sqrt(d)) v by the faster of two implementations; dropout acts on the probabilities."""

    caches, packs, variants, tells_scores = True, True, frozenset(VARIANTS), True

    def __init__(self, dropout: float, variant: Variant = PLAIN) -> None:
        super().__init__()
        self.dropout, self.variant = dropout, variant

    @classmethod
    def shaped(cls, shape: AttentionShape, dropout: float) -> CoreAttention:
        """That of a layer of this ``shape``."""
        return cls(dropout, Variant(shape.scale, shape.window, shape.softcap))

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
        variant = self.variant
        if len(key) > len(query):
            mask = _later_causal(query, key) if mask is None else mask
            return _attention(variant)(query, key, value, mask, 0.0, variant)
        dropout = self.dropout if self.training else 0.0
        if documents is None:
            return _faster(query, key, value, mask, dropout, variant)
        if on_cpu(query):
            return attend_by_spans(query, key, value, documents, partial(_faster, dropout=dropout, variant=variant))
        if fused_varlen(query, variant.window) and not dropout and variant.softcap is None:
            return attend_by_lengths(query, key, value, documents, variant.scale, variant.window)
        mask = within_documents(documents, len(query))
        return _attention(variant)(query, key, value, mask, dropout, variant)

    def largest_scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Query [s, b, n, d], key [s, b, k, d] -> [n], fp32 or more; a soft-cap comes after these scores."""
        mask = mask if documents is None else within_documents(documents, len(query))
        return largest_scores(query, key, _within_window(query, key, mask, self.variant.window), self.variant.scale)


def _faster(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, variant: Variant = PLAIN
) -> Tensor:
    attend = matmul_attention if matmuls_are_faster(query, dropout) else _attention(variant)
    return attend(query, key, value, mask, dropout, variant)


def _attention(variant: Variant) -> Callable[..., Tensor]:
    """PyTorch's attention, unless scores are capped, which it does not do."""
    return fused_attention if variant.softcap is None else matmul_attention


def _later_causal(query: Tensor, key: Tensor) -> Tensor | None:
    """The causal mask [s, c] of the last s of c tokens; None for one query, which sees all keys."""
    s, c = len(query), len(key)
    return None if s == 1 else torch.ones(s, c, dtype=torch.bool, device=query.device).tril(c - s)


def _within_window(query: Tensor, key: Tensor, mask: Tensor | None, window: int | None) -> Tensor | None:
    """``mask``, or the causal one [s, c] for None, without the keys that lie before a query's ``window``."""
    s, c = len(query), len(key)
    if window is None or window >= c:
        return mask
    band = torch.ones(s, c, dtype=torch.bool, device=query.device).triu_(c - s - window + 1)
    return band.tril_(c - s) if mask is None else mask & band


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, variant: Variant = PLAIN
) -> Tensor:
    """PyTorch's attention, one kernel where the backend has one; arguments as in :meth:`CoreAttention.forward`."""
    groups = query.shape[2] // key.shape[2]
    mask = _within_window(query, key, mask, variant.window)
    if len(query) == 1 < groups and not dropout:
        # Queries of one token that share keys are rows of one product: each key is read once.
        rows = query[0].unflatten(1, (-1, groups))  # [b, k, g, d]
        key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)  # [b, k, c, d]
        x = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=variant.scale)
        return x.flatten(1)[None]  # [1, b, n*d]
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, n, d] -> [b, n, s, d]
    x = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=0.0 if stands_for_gpu(query) else dropout,  # whose kernel keeps a seed, where a CPU keeps scores
        is_causal=mask is None and query.shape[2] == key.shape[2],
        scale=variant.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return x.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n*d]


def matmul_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, variant: Variant = PLAIN
) -> Tensor:
    """Two batched matrix products with a softmax between them; arguments as in :meth:`CoreAttention.forward`.

    The query heads that share a key-value head become rows of one product. Under the causal mask, each block of queries
    is multiplied only with the keys up to the block's end, from where its first window begins. Scores of 16-bit
    operands are rounded to 16 bits, as in Megatron-LM; the softmax computes in fp32.
    """
    (s, b, n, d), (c, k) = query.shape, (len(key), key.shape[2])
    queries = query.permute(1, 2, 0, 3).reshape(b * k, n // k, s, d)  # [s, b, n, d] -> [b*k, g, s, d]
    keys, values = (x.permute(1, 2, 0, 3).reshape(b * k, c, d) for x in (key, value))  # [c, b, k, d] -> [b*k, c, d]
    if mask is None and s == c:
        blocks = []
        for start in range(0, s, BLOCK):
            stop, first = min(start + BLOCK, s), max(0, start + 1 - (variant.window or s))
            bias = _causal_bias(query, start, stop, first, variant.window)
            blocks.append(
                _attend(queries[:, :, start:stop], keys[:, first:stop], values[:, first:stop], bias, dropout, variant)
            )
        x = torch.cat(blocks, dim=2).view(b, n, s, d)
    else:
        seen = _within_window(query, key, mask, variant.window)
        hidden = query.new_zeros(b, 1, s, c, dtype=torch.bool) if seen is None else ~seen.expand(b, 1, s, c)
        bias = query.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(query.dtype).min)  # [b, 1, s, c]
        bias = bias.expand(b, k, s, c).reshape(b * k, 1, s, c)
        x = _attend(queries, keys, values, bias, dropout, variant).view(b, n, s, d)
        x = x.masked_fill(hidden.all(-1, keepdim=True), 0.0)  # [b, 1, s, 1]: queries that may attend to no key
    return x.permute(2, 0, 1, 3).flatten(2)  # [b, n, s, d] -> [s, b, n, d] -> [s, b, n*d]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, dropout: float, variant: Variant) -> Tensor:
    """Queries [b*k, g, r, d], keys and values [b*k, c, d] -> [b*k, g, r, d].

    ``bias`` [b*k or 1, 1, r, c] is added to the scores: 0 for visible keys, the most negative finite number for hidden
    ones. It is finite because a row of -inf would make the softmax return NaN.
    """
    batch, groups, rows, d = queries.shape
    bias = bias.expand(-1, groups, -1, -1).flatten(1, 2)
    scale, cap = d**-0.5 if variant.scale is None else variant.scale, variant.softcap
    queries, across = queries.flatten(1, 2), keys.transpose(1, 2)
    if cap is None:
        scores = torch.baddbmm(bias, queries, across, alpha=scale)  # [b*k, g*r, c]
    else:
        scores = bias + cap * torch.tanh(torch.bmm(queries, across) * (scale / cap))
    probabilities = F.dropout(scores.softmax(-1), dropout)
    return torch.bmm(probabilities, values).view(batch, groups, rows, d)


def _causal_bias(query: Tensor, start: int, stop: int, first: int = 0, window: int | None = None) -> Tensor:
    """Bias for queries ``start`` to ``stop`` - 1 and the keys ``first`` to ``stop`` - 1: [1, 1, r, c]."""
    hidden = query.new_full((1, 1, stop - start, stop - first), torch.finfo(query.dtype).min)
    if window is None:
        return hidden.triu_(start - first + 1)
    return hidden.triu(start - first + 1) + hidden.tril(start - first - window)


def matmuls_are_faster(query: Tensor, dropout: float) -> bool:
    """Whether :func:`matmul_attention` beats the fused kernel, as ``benchmarks.single --only attention`` measured.

    On a CPU with PyTorch 2.13, matrix products are up to twice as fast in bf16 and slightly faster in fp32; fp16 has no
    fast products there. They keep the probabilities for the backward, s x s values per head. The fused CPU kernel keeps
    none, but it does not support dropout and PyTorch then falls back to code that keeps them too. Without dropout the
    products are therefore used only for ``s <= 8 d``, where the probabilities add about a quarter to the layer's other
    saved activations (Korthikanti et al. 2022, section 4).
    """
    fast = on_cpu(query) and query.dtype in (torch.float32, torch.bfloat16)
    return fast and (dropout > 0 or len(query) <= 8 * query.shape[-1])
