"""The kernels of :mod:`loss_rows`, in Triton. One program reads one row, or one block of a row, and computes in fp32.

Offsets are 64-bit: logits of 43,000 tokens over 50,000 classes have more than 2^31 values. Loads and stores are masked
by the number of columns, which padding makes a multiple of 16, and not by that of classes: else each would be of one
value.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Columns that a program reads at a time at most, and a thread: two loads of 16 bytes where values have 16 bits.
BLOCK, OF_A_THREAD = 4096, 16


def tile(columns: int) -> tuple[int, int]:
    """The block for rows of so many ``columns``, a power of two, and the warps of a program."""
    block = min(BLOCK, max(128, triton.next_power_of_2(columns)))
    return block, max(1, block // (32 * OF_A_THREAD))


@triton.jit
def row_statistics(
    logits: tl.tensor,
    column: tl.tensor,
    found: tl.tensor,
    row_stride: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    classes: tl.tensor,
    spreads: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write a row's maximum, sum of exponentials, logit at ``column`` and, with ``spreads``, sum of differences.

    ``found`` [3 or 4, count] gets them; exponentials and differences are those of the values less the maximum. Each
    lane keeps a maximum and a sum of its own columns, which are joined at the end: no exchange of lanes within the
    loop. The least finite number is the maximum of nothing, so that a row of -inf alone gives no nan here.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    start_of_row = logits + row * row_stride
    top = tl.full([block], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([block], tl.float32)
    values = tl.zeros([block], tl.float32)
    for start in range(0, columns, block):
        at = start + lanes
        real = at < classes
        x = tl.load(start_of_row + at, mask=at < columns, other=0.0).to(tl.float32)
        if spreads:
            values += tl.where(real, x, 0.0)
        x = tl.where(real, x, -float("inf"))
        larger = tl.maximum(top, x)
        total = total * tl.exp(top - larger) + tl.exp(x - larger)
        top = larger
    largest = tl.max(top, axis=0)
    tl.store(found + row, largest)
    tl.store(found + count + row, tl.sum(total * tl.exp(top - largest), axis=0))
    label = tl.load(column + row)
    tl.store(found + 2 * count + row, tl.load(start_of_row + label, mask=label < classes, other=0.0).to(tl.float32))
    if spreads:
        tl.store(found + 3 * count + row, tl.sum(values, axis=0) - largest * classes)


@triton.jit
def row_gradient(
    logits: tl.tensor,
    result: tl.tensor,
    column: tl.tensor,
    holds_label: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    grad: tl.tensor,
    row_stride: tl.tensor,
    result_stride: tl.tensor,
    columns: tl.tensor,
    classes: tl.tensor,
    likely: tl.tensor,
    smooth: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Write ``(softmax - likely * one_hot(column) - smooth) * grad`` for one block of a row; zeros behind the classes.

    ``holds_label`` is false where the label is another rank's. Each value is read before it is written, by the same
    program: ``result`` may be ``logits``.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * block + tl.arange(0, block)
    held, real = lanes < columns, lanes < classes
    x = tl.load(logits + row * row_stride + lanes, mask=held, other=0.0).to(tl.float32)
    x = tl.where(real, x, -float("inf"))
    of_loss = tl.load(grad + row).to(tl.float32)
    at_label = (lanes == tl.load(column + row)) & (tl.load(holds_label + row) != 0)
    slope = tl.exp(x - tl.load(largest + row)) * (of_loss / tl.load(total + row)) - of_loss * smooth
    slope = tl.where(real, slope - tl.where(at_label, of_loss * likely, 0.0), 0.0)
    tl.store(result + row * result_stride + lanes, slope.to(result.dtype.element_ty), mask=held)
