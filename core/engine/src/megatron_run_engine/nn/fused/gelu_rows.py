"""GeLU and its gradient, each in one pass; the gradient's column sums are those of a bias that was added before.

Legend: * any leading dimensions, N their product, f features, u parts of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from megatron_run_engine.nn.fused.column_sums import Parts, Tile, parts_of

#: Values of a program of the forward, 16 for each thread, and its warps.
BLOCK, WARPS = 2048, 4
#: Tile of the backward, and programs at most, eight for each multiprocessor: these hide what reads take, and nothing is
#: fetched ahead.
TILE, PROGRAMS = Tile(16, 128, 4, 1), 1056

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("gelu(Tensor x, bool tanh) -> Tensor")
_library.define("gelu_gradient(Tensor grad, Tensor x, bool tanh) -> (Tensor, Tensor)")


def fused_gelu(x: Tensor, *, tanh: bool) -> Tensor:
    """GeLU of x [*], rounded once; ``tanh`` is the form that PyTorch calls ``approximate="tanh"``."""
    result: Tensor = torch.ops.megatron_run_engine.gelu(x, tanh)
    return result


def fused_gelu_gradient(grad: Tensor, x: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradient of x [*, f] from that of the result, and sums [u, f] in fp32 whose sum is that of its N rows."""
    found: tuple[Tensor, Tensor] = torch.ops.megatron_run_engine.gelu_gradient(grad, x, tanh)
    return found


def _gelu(x: Tensor, tanh: bool) -> Tensor:
    from megatron_run_engine.nn.fused import gelu_kernels as kernels

    result, values = _like(x), x.numel()
    if values:
        with torch.cuda.device_of(x):
            kernels.gelu[(-(-values // BLOCK),)](x.contiguous(), result, values, tanh, BLOCK, num_warps=WARPS)
    return result


def _gradient(grad: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    from megatron_run_engine.nn.fused import gelu_kernels as kernels

    result, sums = _empty(x)
    rows, columns, parts = _cut(x)
    if result.numel():
        with torch.cuda.device_of(x):
            kernels.gelu_gradient[parts.across, parts.down](
                grad.contiguous(), x.contiguous(), result, sums, rows, columns, parts.rows,
                tanh, TILE.rows, TILE.columns, TILE.stages, num_warps=TILE.warps,
            )  # fmt: skip
    return result, sums


def _cut(x: Tensor) -> tuple[int, int, Parts]:
    """Rows, columns and parts of x [*, f]."""
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    return rows, columns, parts_of(rows, columns, TILE, PROGRAMS)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    _, columns, parts = _cut(x)
    return _like(x), torch.empty((parts.down, columns), dtype=torch.float32, device=x.device)


for _device in ("CPU", "CUDA"):
    _library.impl("gelu", _gelu, _device)
    _library.impl("gelu_gradient", _gradient, _device)
_library.impl("gelu", lambda x, _tanh: _like(x), "Meta")
_library.impl("gelu_gradient", lambda _grad, x, _tanh: _empty(x), "Meta")
