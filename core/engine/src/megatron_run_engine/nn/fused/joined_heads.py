"""The split of projected features into heads of queries, keys and values, whose gradients are joined in one pass.

Attention's backward leaves its gradients in layouts of their own. To concatenate them PyTorch's compiler computes, for
each value of the result, the addresses in all of them, which takes several times as long as to move the values, and
does so twice where the result is both an operand and kept.

Legend: s sequence, b micro batch, n heads of a part, d their size, f features, which are the sum of n d over the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library

from megatron_run_engine.nn.fused.availability import fuses

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Values that a program copies, and warps of it: two loads of 16 bytes for each thread where values have 16 bits.
_TILE, _WARPS = 2048, 4

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("join_heads(Tensor first, Tensor second, Tensor? third) -> Tensor")


def split_heads(x: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Views [s, b, n, d] of the features of x [s, b, f]: two or three parts, ``shapes`` has n and d of each in order.

    The gradient of x is contiguous, whatever the layouts of those of the parts; a part without one counts as zeros.
    """
    if torch.is_grad_enabled() and x.requires_grad and fuses(x):
        parts: tuple[Tensor, ...] = _SplitHeads.apply(x, tuple(shapes))  # type: ignore[no-untyped-call]  # torch's
        return parts
    return _parts(x, shapes)


def join_heads(first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor:
    """The features of all parts [s, b, n, d], of any strides, in order: [s, b, f], contiguous."""
    result: Tensor = torch.ops.megatron_run_engine.join_heads(first, second, third)
    return result


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shapes: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.outer, ctx.shapes = x.shape[:2], shapes
        return _parts(x, shapes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None
        parts = (
            given.new_zeros((*ctx.outer, *shape)) if grad is None else grad
            for grad, shape in zip(grads, ctx.shapes, strict=True)
        )
        return join_heads(*parts), None


def _parts(x: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    pieces = x.split([heads * size for heads, size in shapes], dim=-1)
    return tuple(piece.unflatten(-1, shape) for piece, shape in zip(pieces, shapes, strict=True))


def _join(first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    from megatron_run_engine.nn.fused import join_kernels as kernels

    result = _empty(first, second, third)
    places, batch = first.shape[:2]
    given = (first, second) if third is None else (first, second, third)
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in given]
    block = max(16, 1 << (max(part.shape[3] for part in parts) - 1).bit_length())
    rows = max(1, _TILE // block)
    if result.numel():
        tiles = sum(-(-batch * part.shape[2] // rows) for part in parts)
        lacking = 3 - len(parts)  # the kernel takes three parts; this one has no heads
        shapes = [number for part in parts for number in part.shape[2:]] + [0, 1] * lacking
        parts += parts[:1] * lacking
        strides = [step for part in parts for step in part.stride()[:3]]
        with torch.cuda.device_of(result):
            kernels.join_heads[places, tiles](*parts, result, *strides, batch, *shapes, rows, block, num_warps=_WARPS)
    return result


def _empty(first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    features = sum(part.shape[2] * part.shape[3] for part in (first, second, third) if part is not None)
    return torch.empty((*first.shape[:2], features), dtype=first.dtype, device=first.device)


for _device in ("CPU", "CUDA"):
    _library.impl("join_heads", _join, _device)
_library.impl("join_heads", _empty, "Meta")
