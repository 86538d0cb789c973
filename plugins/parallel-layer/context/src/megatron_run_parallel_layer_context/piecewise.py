"""Attention of this rank's queries to keys that arrive from all ranks, and are never all here in the ring.

Softmax over keys that come in parts follows from each part's output and the logarithm of its sum of exponentials, by
which parts are joined (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention", section 3.1). The backward needs
only those of all parts, so keys travel again and nothing of other ranks is kept between forward and backward.

Legend: s tokens of a sample, C context-parallel ranks, b micro batch, n heads, k key-value heads, d head size; n and k
are those of this tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import AttentionCore
from megatron_run.contracts.parallel_layer import VARIANTS
from megatron_run.errors import PluginError
from megatron_run_parallel_layer_context.fused import Forward
from megatron_run_parallel_layer_context.pairs import Attended, Gradients, Largest, Rule
from megatron_run_parallel_layer_context.transport import make_transport

if TYPE_CHECKING:
    from megatron_run.contracts import AttentionShape, Pieces
    from megatron_run_engine.runtime import ParallelGroup
    from megatron_run_parallel_layer_context.transport import Transport


class PiecewiseAttention(nn.Module, AttentionCore):
    """The core of a layer's attention whose keys and values come by ``method``, ``ring`` or ``all_gather``.

    ``stream`` are the random numbers of dropout; each rank has its own.
    """

    packs, pieces, variants, tells_scores = True, True, frozenset(VARIANTS), True

    def __init__(
        self,
        shape: AttentionShape,
        dropout: float,
        pieces: Pieces,
        peers: ParallelGroup,
        method: str,
        stream: torch.Generator,
    ) -> None:
        super().__init__()
        scale = shape.head_size**-0.5 if shape.scale is None else shape.scale
        self.rule = Rule(scale, shape.window, shape.softcap, dropout)
        self._pieces, self._stream = pieces, stream
        self._transport = make_transport(method, peers)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Query [s/C, b, n, d], key and value [s/C, b, k, d] -> [s/C, b, n*d]; causal, within ``documents`` [b, c]."""
        if mask is not None:
            raise PluginError(
                "attention over pieces of samples is causal, and the model gave it a mask",
                fix="set parallel.context=1, or parallel-layer.method=ulysses, which takes masks of whole samples",
            )
        rule = self.rule if self.training else self.rule.without_dropout()
        work = _Work(self._pieces, self._transport, rule, self._stream)
        attended: Tensor = _Piecewise.apply(query, key, value, documents, work)  # type: ignore[no-untyped-call]  # torch's
        return attended

    def largest_scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Query [s/C, b, n, d], key [s/C, b, k, d] -> [n], of this rank's queries; keys travel once more."""
        work = _Work(self._pieces, self._transport, self.rule, self._stream)
        seen = Largest(query.permute(1, 2, 0, 3), work.columns(len(query)), documents, self.rule, self._stream)
        for owner, keys in self._transport.arriving(key.contiguous()):
            seen.add(keys.permute(1, 2, 0, 3), work.columns(len(key), owner))
        return seen.found


@dataclass(frozen=True)
class _Work:
    """The pieces and the way of keys in both passes of one call."""

    pieces: Pieces
    transport: Transport
    rule: Rule
    stream: torch.Generator

    def columns(self, tokens: int, owner: int | None = None) -> tuple[range, ...]:
        """The columns of the ``tokens`` that a rank holds, this one's by default."""
        return self.pieces.columns(tokens * self.pieces.ranks, owner)


class _Piecewise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, work: _Work) -> Tensor:
        columns, both = work.columns(len(query)), torch.stack((key, value))  # [2, s/C, b, k, d]
        ctx.drawn = work.stream.get_state() if work.rule.dropout else None
        seen = Attended(query.permute(1, 2, 0, 3), columns, documents, work.rule, work.stream)
        for owner, (keys, values) in work.transport.arriving(both):
            seen.add(keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3), work.columns(len(key), owner))
        # The result itself is kept, which the next layer keeps too, and keys and values as they came: no copies.
        result = seen.out.permute(2, 0, 1, 3).to(query.dtype, memory_format=torch.contiguous_format).flatten(2)
        ctx.save_for_backward(query, key, value, result, seen.logsum, documents)
        ctx.work = work
        return result  # [s/C, b, n*d]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (query, key, value, result, logsum, documents), work = ctx.saved_tensors, ctx.work
        both = torch.stack((key, value))
        out, grad = (x.unflatten(2, (query.shape[2], -1)).permute(1, 2, 0, 3) for x in (result, grads[0]))
        after = None if ctx.drawn is None else work.stream.get_state()
        if ctx.drawn is not None:
            work.stream.set_state(ctx.drawn)  # the same masks, drawn in the same order
        columns = work.columns(len(query))
        forward = Forward(query.permute(1, 2, 0, 3), out, logsum, grad)
        found = Gradients(forward, columns, documents, work.rule, work.stream)
        leaving = work.transport.leaving()
        for owner, (keys, values) in work.transport.arriving(both):
            part = found.of(keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3), work.columns(len(key), owner))
            leaving.add(owner, part.permute(0, 3, 1, 2, 4))  # [2, b, k, s/C, d] -> [2, s/C, b, k, d]
        if after is not None:
            work.stream.set_state(after)
        to_key, to_value = leaving.own().to(both.dtype)
        return found.query.permute(2, 0, 1, 3).to(query.dtype), to_key, to_value, None, None
