"""Attention within the documents of packed rows: what ``documents`` means to masks, kernels and products.

Legend: s sequence, b micro batch, n heads, k key-value heads, d head size, c bounds of a row's documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from megatron_run_engine.nn.device import on_gpu

if TYPE_CHECKING:
    from torch import Tensor

#: ``(query [r, b, n, d], key and value [r, b, k, d], mask [r, r] or None for causal) -> [r, b, n*d]``.
Attend = Callable[["Tensor", "Tensor", "Tensor", "Tensor | None"], "Tensor"]

#: Neighbouring documents share one product of at most so many rows: one for each would cost more calls than work.
TOGETHER = 128


def within_documents(documents: Tensor, length: int) -> Tensor:
    """The causal mask within ``documents`` [b, c]: [b, 1, s, s], true where a query may attend."""
    columns = torch.arange(length, device=documents.device)
    # The last bound at or before a column begins its document, also after documents of no tokens.
    index = torch.searchsorted(documents, columns.expand(len(documents), length).contiguous(), right=True) - 1
    first = documents.gather(1, index)[:, None, :, None]  # [b, 1, s, 1], of each query's document
    return (columns >= first) & (columns <= columns[:, None])


def both_ways(documents: Tensor | None, length: int, rows: int, device: torch.device) -> Tensor:
    """The mask within ``documents`` [b, c], where a query sees later keys too: [rows, 1, length, length].

    A row of the data may be several of the model, one after the other. Without documents a row is one: [1, 1, 1, s].
    """
    if documents is None:
        return torch.ones(1, 1, 1, length, dtype=torch.bool, device=device)
    columns = torch.arange(rows * length // len(documents), device=device).expand(len(documents), -1).contiguous()
    own = torch.searchsorted(documents, columns, right=True).view(rows, 1, length)  # the number of its document
    return own[..., None] == own[:, :, None]


def attend_by_spans(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, attend: Attend) -> Tensor:
    """Query [s, b, n, d], key and value [s, b, k, d] -> [s, b, n*d], a long document or some short ones at a time.

    The host reads ``documents``, so this is for CPUs. The work of a row is at most that of one document of its length,
    and ``TOGETHER`` scores a token where documents are short.
    """
    rows = []
    for row, bounds in enumerate(documents.tolist()):
        spans = list(_spans(bounds))
        sizes = [span[-1] - span[0] for span in spans]
        queries, keys, values = (x[:, row : row + 1].split(sizes) for x in (query, key, value))
        masks = (_mask(span, query.device) for span in spans)
        rows.append(torch.cat(list(map(attend, queries, keys, values, masks))))  # [s, 1, n*d]
    return torch.cat(rows, dim=1)


def _spans(bounds: list[int]) -> Iterator[list[int]]:
    """Yield the bounds of neighbouring documents of a row, all together at most ``TOGETHER`` tokens, or one alone."""
    span = bounds[:1]
    for start, stop in pairwise(bounds):
        if stop == start:
            continue
        if stop - span[0] > TOGETHER and len(span) > 1:
            yield span
            span = [start]
        span.append(stop)
    yield span


def _mask(bounds: list[int], device: torch.device) -> Tensor | None:
    """The mask [r, r] of the span with ``bounds``; None for one document."""
    return None if len(bounds) == 2 else _made_mask(tuple(bound - bounds[0] for bound in bounds), device)


@lru_cache(maxsize=1024)  # 16 MB: every layer, and the backward that recomputes it, ask for those of the same rows
def _made_mask(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    return within_documents(torch.tensor([bounds], device=device), bounds[-1])[0, 0]


def fused_varlen(query: Tensor, window: int | None = None) -> bool:
    """Whether :func:`attend_by_lengths` has a kernel for queries of this type and this window, without dropout."""
    kernel, halved = _varlen(), query.dtype in (torch.float16, torch.bfloat16)
    windows = window is None or (kernel is not None and "window_size" in kernel.parameters)
    return on_gpu(query) and halved and kernel is not None and windows


def attend_by_lengths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """As :func:`attend_by_spans`, in one kernel that skips other documents; nothing is read by the host."""
    kernel = _varlen()
    assert kernel is not None
    (s, b, n, _), k = query.shape, key.shape[2]
    flat = [x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)]  # [b*s, n, d]
    if k != n and "enable_gqa" not in kernel.parameters:
        flat[1:] = [x.repeat_interleave(n // k, dim=1) for x in flat[1:]]
        k = n
    options: dict[str, Any] = {"enable_gqa": True} if k != n else {}
    options |= {} if scale is None else {"scale": scale}
    sides = (-1 if window is None else window - 1, 0)
    causal: dict[str, Any] = {"window_size": sides} if "window_size" in kernel.parameters else {"is_causal": True}
    lengths = cumulative_lengths(documents, s)
    x: Tensor = kernel.call(*flat, lengths, lengths, s, s, **causal, **options)  # [b*s, n, d]
    return x.reshape(b, s, -1).transpose(0, 1)


def cumulative_lengths(documents: Tensor, length: int) -> Tensor:
    """Where the documents of all rows begin in [b*s] tokens, row after row, and b*s: int32 [b*(c-1) + 1].

    The number of entries depends on no value, and documents of no tokens are left in: kernels skip them.
    """
    b = len(documents)
    starts = documents[:, :-1] + length * torch.arange(b, device=documents.device)[:, None]
    return torch.cat((starts.flatten(), starts.new_full((1,), b * length))).to(torch.int32)


class _Kernel:
    """``torch.nn.attention.varlen.varlen_attn``, whose arguments changed from release to release."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.parameters = call, frozenset(signature(call).parameters)


@cache
def _varlen() -> _Kernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch below 2.10
        return None
    return _Kernel(varlen_attn)
