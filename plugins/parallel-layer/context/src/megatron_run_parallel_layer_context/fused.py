"""PyTorch's flash attention with the logarithm of its sums, on CPUs and on GPUs (Dao 2023, "FlashAttention-2").

Legend: b micro batch, n heads, k key-value heads, p tokens of a piece, d head size, c bounds of a row's documents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_run_engine.nn import cumulative_lengths, on_cpu, on_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

_ATEN = torch.ops.aten


class Sight(NamedTuple):
    """Which keys the queries of a pair see, by the columns of both.

    All keys or, where both are the same columns, those up to the query's own; of packed rows, with bounds ``documents``
    [b, c], those of its own document.
    """

    queries: range
    keys: range
    documents: Tensor | None = None

    @property
    def causal(self) -> bool:
        """Whether a query sees no later ones."""
        return self.queries == self.keys

    def lengths(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Where the parts of documents begin in the queries, and in the keys, of all rows: int32 [b*(c-1) + 1] each."""
        found = []
        for columns in (self.queries, self.keys):
            bounds = self.documents
            if bounds is None:
                bounds = torch.tensor([columns.start, columns.stop], device=query.device).expand(len(query), 2)
            found.append(cumulative_lengths((bounds - columns.start).clamp(0, len(columns)), len(columns)))
        return found[0], found[1]


def fuses(query: Tensor, *, packed: bool) -> bool:
    """Whether there is a kernel for queries of this type on this device, and for documents if rows are ``packed``."""
    if on_cpu(query):
        return not packed
    halved, size = query.dtype in (torch.float16, torch.bfloat16), query.shape[-1]
    return on_gpu(query) and halved and size % 8 == 0 and size <= 256


def fused(query: Tensor, key: Tensor, value: Tensor, sight: Sight, scale: float) -> tuple[Tensor, Tensor]:
    """Query [b, n, p, d], key and value [b, k, p, d] -> out [b, n, p, d] and log of sums [b, n, p], fp32 or more."""
    if on_cpu(query):
        key, value = (_for_each_head(x, query) for x in (key, value))
        out, logsum = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, sight.causal, scale=scale
        )
        return out, logsum
    ends, sizes = sight.lengths(query), (len(sight.queries), len(sight.keys))
    out, logsum, *_ = _ATEN._flash_attention_forward(
        *_flat(query, key, value), *ends, *sizes, 0.0, sight.causal, False, scale=scale
    )
    # A query whose document has no keys here gets zeros, and a logarithm of +inf where that of no sum is -inf.
    logsum = logsum.masked_fill(logsum == torch.inf, -torch.inf)  # [n, b*p]
    return _rows(out, query), logsum.unflatten(1, (len(query), -1)).transpose(0, 1)


class Forward(NamedTuple):
    """Queries, what became of them by all keys, and the gradient of that: [b, n, p, d], and [b, n, p] of ``logsum``."""

    query: Tensor
    out: Tensor
    logsum: Tensor
    grad: Tensor

    def of(self, rows: slice) -> Forward:
        """Those of ``rows`` of a piece."""
        return Forward(*(each[:, :, rows] for each in self))


def fused_backward(
    forward: Forward, key: Tensor, value: Tensor, sight: Sight, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, which are a part of the keys of ``forward``."""
    query, out, logsum, grad = forward
    if on_cpu(query):
        keys, values = (_for_each_head(x, query) for x in (key, value))
        slopes, *found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, keys, values, out, logsum, 0.0, sight.causal, scale=scale
        )
        heads = key.shape[1]
        by_head = [each.unflatten(1, (heads, -1)).sum(2) for each in found]
        return slopes, by_head[0], by_head[1]
    ends, sizes = sight.lengths(query), (len(sight.queries), len(sight.keys))
    drawn = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random numbers of dropout, which there is not
    slopes, *found = _ATEN._flash_attention_backward(
        *_flat(grad, query, key, value, out),
        logsum.transpose(0, 1).flatten(1).contiguous(),
        *ends,
        *sizes,
        0.0,
        sight.causal,
        drawn,
        drawn.new_empty(0),
        scale=scale,
    )
    return _rows(slopes, query), _rows(found[0], key), _rows(found[1], key)


def _flat(*each: Tensor) -> Sequence[Tensor]:
    """[b, n, p, d] -> [b*p, n, d]."""
    return [x.transpose(1, 2).flatten(0, 1) for x in each]


def _rows(flat: Tensor, like: Tensor) -> Tensor:
    """[b*p, n, d] -> [b, n, p, d], the shape of ``like``."""
    rows: Tensor = flat.unflatten(0, (len(like), -1))
    return rows.transpose(1, 2)


def _for_each_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values [b, k, p, d] -> [b, n, p, d]: a copy for each query head that shares them."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)
