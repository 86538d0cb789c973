"""The backward of layer norm and root-mean-square norm, which reads each row once for all of its gradients.

PyTorch's reads the rows once for the gradient of x and again for those of weight and bias, and rounds those to the
weights' type. Here programs add them up in fp32, each over its rows: what remains is to add the programs' sums.

Legend: N rows, h features, u programs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

#: Features at most: beyond, a program could not keep the sums of a row in its registers.
WIDEST_NORM = 16384
#: Values that a program reads at a time, half as many in rows up to ``NARROW``, and each of its threads; warps of a
#: program at most.
TILE, NARROW, OF_A_THREAD, WARPS = 4096, 1024, 16, 16
#: Tiles that a program works on or has on their way, at most; bytes of shared memory at most for those on their way.
STAGES, AHEAD = 3, 2**16
#: Programs at most: two for each of the 132 multiprocessors of an H100 or H200, and twice as many with half a tile.
PROGRAMS = 264

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define(
    "norm_gradients(Tensor grad, Tensor x, Tensor weight, Tensor? mean, Tensor scale, Tensor? beside=None)"
    " -> (Tensor, Tensor, Tensor)"
)


def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, scale: Tensor, beside: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x [N, h], and sums [u, h] in fp32 whose sums are the gradients of weight and of bias.

    ``grad`` [N, h] is that of the result, ``mean`` and ``scale`` (1/deviation) [N] are the forward's, in fp32. Without
    a mean it is a root-mean-square norm, whose last result has no rows. ``beside`` [N, h], the gradient that x gets
    from elsewhere, as from a residual connection, is added to that of x. All of [N, h] are contiguous.
    """
    norm = torch.ops.megatron_run_engine.norm_gradients
    found: tuple[Tensor, Tensor, Tensor] = norm(grad, x, weight, mean, scale, beside)
    return found


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, scale: Tensor, beside: Tensor | None = None
) -> tuple[Tensor, ...]:
    from megatron_run_engine.nn.fused import norm_kernels as kernels

    found = _empty(x, mean)
    (rows, columns), block = x.shape, _block(x)
    block_rows = rows_of(block)
    warps = min(WARPS, max(1, block * block_rows // (32 * OF_A_THREAD)))
    with torch.cuda.device_of(x):
        kernels.norm_gradient[(len(found[1]),)](
            x,
            grad,
            weight,
            scale if mean is None else mean,
            scale,
            x if beside is None else beside,
            *found,
            rows,
            columns,
            mean is not None,
            beside is not None,
            block_rows,
            block,
            stages_of(block * block_rows * x.itemsize * (2 if beside is None else 3)),
            num_warps=warps,
        )
    return found


def rows_of(block: int) -> int:
    """Rows that a program reads at a time, of ``block`` features."""
    return max(1, TILE // (2 if block <= NARROW else 1) // block)


def stages_of(tile: int) -> int:
    """Tiles of that many bytes that a program works on or has on their way: one alone takes no shared memory."""
    return min(STAGES, 1 + AHEAD // tile)


def _empty(x: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    block = _block(x)
    most = PROGRAMS * (2 if block <= NARROW else 1)
    programs = min(most, max(1, -(-rows // rows_of(block))))
    sums = [torch.empty((count, columns), dtype=torch.float32, device=x.device) for count in (programs, 0)]
    return torch.empty_like(x), sums[0], torch.empty_like(sums[0]) if mean is not None else sums[1]


def _block(x: Tensor) -> int:
    """The features of a row, up to the next power of two."""
    return max(16, 1 << (x.shape[1] - 1).bit_length())


for _device in ("CPU", "CUDA"):
    _library.impl("norm_gradients", _gradients, _device)
_library.impl("norm_gradients", lambda _grad, x, _weight, mean, *_: _empty(x, mean), "Meta")
