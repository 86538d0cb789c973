"""The rotation of queries and keys by their positions in one pass; its backward is the rotation back.

Legend: s sequence, b micro batch, n heads, d head size, r rotated features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

#: Values of a program: heads times pairs of features, padded to powers of two.
_TILE = 1024

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("rotate(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor")


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """X [s, b, n, d] with features j and j + r/2 rotated by ``cos`` and ``sin`` [s, 1 or b, 1, r/2], rounded once."""
    result: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]  # torch's
    return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        result: Tensor = torch.ops.megatron_run_engine.rotate(x, cos, sin, False)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        return torch.ops.megatron_run_engine.rotate(grad, *ctx.saved_tensors, True), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    from megatron_run_engine.nn.fused import elementwise_kernels as kernels

    result = _like(x)
    sequence, batch, heads, features = x.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    pairs = cos.shape[-1]
    block = max(16, 1 << (pairs - 1).bit_length())
    block_heads = min(max(1, _TILE // block), 1 << (heads - 1).bit_length())
    of_angles = cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0
    if result.numel():
        with torch.cuda.device_of(x):
            kernels.rotate[sequence * batch, -(-heads // block_heads)](
                x, cos, sin, result, *x.stride()[:3], *of_angles, batch, heads, features, pairs,
                -1 if back else 1, block_heads, block, num_warps=4,
            )  # fmt: skip
    return result


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


for _device in ("CPU", "CUDA"):
    _library.impl("rotate", _rotate, _device)
_library.impl("rotate", lambda x, *_: _like(x), "Meta")
