"""``silu(gate) * up`` and its gradient, each in one pass: [N, 2f] holding gate then up, and [N, f]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

#: Features of a program, eight for each thread.
_BLOCK, _WARPS = 1024, 4

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("swiglu(Tensor x) -> Tensor")
_library.define("swiglu_gradient(Tensor grad, Tensor x) -> Tensor")


def fused_swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up``: [*, 2f] -> [*, f], rounded once."""
    result: Tensor = torch.ops.megatron_run_engine.swiglu(x)
    return result


def fused_swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x [*, 2f] from that of the result [*, f]."""
    result: Tensor = torch.ops.megatron_run_engine.swiglu_gradient(grad, x)
    return result


def _swiglu(x: Tensor) -> Tensor:
    from megatron_run_engine.nn.fused import elementwise_kernels as kernels

    result = _half(x)
    features = result.shape[-1]
    if result.numel():
        rows = x.reshape(-1, x.shape[-1])
        with torch.cuda.device_of(x):
            kernels.swiglu[len(rows), -(-features // _BLOCK)](
                rows, result, rows.stride(0), features, _BLOCK, num_warps=_WARPS
            )
    return result


def _gradient(grad: Tensor, x: Tensor) -> Tensor:
    from megatron_run_engine.nn.fused import elementwise_kernels as kernels

    result = _whole(x)
    features = grad.shape[-1]
    if result.numel():
        rows, slopes = x.reshape(-1, x.shape[-1]), grad.reshape(-1, features).contiguous()
        with torch.cuda.device_of(x):
            kernels.swiglu_gradient[len(rows), -(-features // _BLOCK)](
                slopes, rows, result, slopes.stride(0), rows.stride(0), features, _BLOCK, num_warps=_WARPS
            )
    return result


def _half(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def _whole(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


for _device in ("CPU", "CUDA"):
    _library.impl("swiglu", _swiglu, _device)
    _library.impl("swiglu_gradient", _gradient, _device)
_library.impl("swiglu", _half, "Meta")
_library.impl("swiglu_gradient", lambda _, x: _whole(x), "Meta")
