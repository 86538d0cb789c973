"""The kernel of :mod:`joined_heads`, in Triton: it copies values, whatever their type."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def join_heads(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    result: tl.tensor,
    place_stride_1: tl.tensor,
    text_stride_1: tl.tensor,
    head_stride_1: tl.tensor,
    place_stride_2: tl.tensor,
    text_stride_2: tl.tensor,
    head_stride_2: tl.tensor,
    place_stride_3: tl.tensor,
    text_stride_3: tl.tensor,
    head_stride_3: tl.tensor,
    batch: tl.tensor,
    heads_1: tl.constexpr,
    size_1: tl.constexpr,
    heads_2: tl.constexpr,
    size_2: tl.constexpr,
    heads_3: tl.constexpr,
    size_3: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Copy some heads of one place of one of three tensors [s, b, n, d] with strides into ``result`` [s, b, f].

    Each program reads one of the tensors, and a branch, not masks, says which: a program that read all three for each
    value would spend more time on addresses than on memory.
    """
    tile = tl.program_id(1)
    tiles_1, tiles_2 = tl.cdiv(batch * heads_1, block_rows), tl.cdiv(batch * heads_2, block_rows)
    end_1: tl.constexpr = heads_1 * size_1
    end_2: tl.constexpr = end_1 + heads_2 * size_2
    features: tl.constexpr = end_2 + heads_3 * size_3
    if tile < tiles_1:
        _copy(
            first, result, place_stride_1, text_stride_1, head_stride_1,
            tile, batch, heads_1, size_1, 0, features, block_rows, block,
        )  # fmt: skip
    elif tile < tiles_1 + tiles_2:
        _copy(
            second, result, place_stride_2, text_stride_2, head_stride_2,
            tile - tiles_1, batch, heads_2, size_2, end_1, features, block_rows, block,
        )  # fmt: skip
    else:
        _copy(
            third, result, place_stride_3, text_stride_3, head_stride_3,
            tile - tiles_1 - tiles_2, batch, heads_3, size_3, end_2, features, block_rows, block,
        )  # fmt: skip


@triton.jit
def _copy(
    source: tl.tensor,
    result: tl.tensor,
    place_stride: tl.tensor,
    text_stride: tl.tensor,
    head_stride: tl.tensor,
    tile: tl.tensor,
    batch: tl.tensor,
    heads: tl.constexpr,
    size: tl.constexpr,
    before: tl.constexpr,
    features: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Copy ``block_rows`` heads, counted through the texts of a place, to behind ``before`` of ``features``."""
    if heads > 0:
        place = tl.program_id(0).to(tl.int64)
        row = tile * block_rows + tl.arange(0, block_rows)
        text, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
        lanes = tl.arange(0, block)
        mask = (row < batch * heads)[:, None] & (lanes < size)[None, :]
        start = place * place_stride + text * text_stride + head * head_stride
        end = (place * batch + text) * features + before + head * size
        values = tl.load(source + start[:, None] + lanes[None, :], mask=mask)
        tl.store(result + end[:, None] + lanes[None, :], values, mask=mask)
