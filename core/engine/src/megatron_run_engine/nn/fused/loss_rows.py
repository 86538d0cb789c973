"""Statistics of rows of logits in one pass, and their gradient in another, which may take the place of the logits.

Both compute in fp32 whatever the logits' type, and allocate a few values per row beside their result.

Legend: N rows, q columns of which the first r are classes, u statistics of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("loss_row_statistics(Tensor logits, Tensor column, int classes, bool spreads) -> Tensor")
_library.define(
    "write_loss_gradient(Tensor logits, Tensor(a!) out, Tensor column, Tensor holds_label, Tensor largest,"
    " Tensor total, Tensor grad, int classes, float likely, float smooth) -> ()"
)


def row_statistics(logits: Tensor, column: Tensor, classes: int, *, spreads: bool) -> Tensor:
    """Of logits [N, q]: the maximum, ``sum(exp(x - max))``, the logit at ``column``, with ``spreads`` ``sum(x - max)``.

    The sums run over the first ``classes`` columns. The result is [u, N] in fp32, u 3 or 4. The most negative finite
    number stands for the maximum of a row that is all -inf or has no classes, whose logit at the column is 0.
    """
    found: Tensor = torch.ops.megatron_run_engine.loss_row_statistics(logits, column, classes, spreads)
    return found


def write_gradient(
    logits: Tensor,
    out: Tensor,
    label: tuple[Tensor, Tensor],
    row: tuple[Tensor, Tensor, Tensor],
    weights: tuple[int, float, float],
) -> None:
    """Write the gradient of logits [N, q] into ``out`` [N, q], which may be the logits.

    ``label`` is its column and whether that counts, ``row`` the maximum, the sum of exponentials and the gradient of
    the loss, each [N]; ``weights`` are the number of classes, the weight of the label and that of every class: the
    gradient is ``(softmax - weight of the label * one_hot - weight of every class) * gradient of the loss``, and 0
    behind the classes.
    """
    torch.ops.megatron_run_engine.write_loss_gradient(logits, out, *label, *row, *weights)


def _statistics(logits: Tensor, column: Tensor, classes: int, spreads: bool) -> Tensor:
    from megatron_run_engine.nn.fused import loss_kernels as kernels

    found = _empty(logits, spreads)
    count, columns = logits.shape
    block, warps = kernels.tile(columns)
    if count:
        with torch.cuda.device_of(logits):
            kernels.row_statistics[count,](
                logits, column, found, logits.stride(0), count, columns, classes, spreads, block, num_warps=warps
            )
    return found


def _empty(logits: Tensor, spreads: bool) -> Tensor:
    return torch.empty((4 if spreads else 3, len(logits)), dtype=torch.float32, device=logits.device)


def _write(logits: Tensor, out: Tensor, *rest: Any) -> None:
    from megatron_run_engine.nn.fused import loss_kernels as kernels

    *of_rows, classes, likely, smooth = rest
    count, columns = logits.shape
    block, warps = kernels.tile(columns)
    steps = logits.stride(0), out.stride(0)
    if count:
        with torch.cuda.device_of(logits):
            kernels.row_gradient[count, -(-columns // block)](
                logits, out, *of_rows, *steps, columns, classes, likely, smooth, block, num_warps=warps
            )


for _device in ("CPU", "CUDA"):
    _library.impl("loss_row_statistics", _statistics, _device)
    _library.impl("write_loss_gradient", _write, _device)
_library.impl("loss_row_statistics", lambda logits, *rest: _empty(logits, rest[-1]), "Meta")
_library.impl("write_loss_gradient", lambda *_: None, "Meta")
