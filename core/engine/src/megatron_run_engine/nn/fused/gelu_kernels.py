"""The kernels of :mod:`gelu_rows`, in Triton; they compute in fp32 and round once.

Legend: cdf and pdf are the distribution function and the density of the standard normal distribution.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slope_and_share(x: tl.tensor, tanh: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The derivative of GeLU at x, and GeLU(x)/x; both forms take two special functions of the hardware.

    ``tanh``: (1 + tanh(u))/2 = sigmoid(2 u) with u = sqrt(2/pi) (x + 0.044715 x^3). Else the cdf: for x < 0 it is
    P(1/(1 + 0.2316419 |x|)) exp(-x^2/2), by Abramowitz and Stegun 1964, 7.1.26, with an absolute error of 7e-8. The
    exponential is the pdf's too, and the product stays exact to 3 digits where 1 + erf has lost all of them.

    Exponentials are powers of two, and inverses squares of inverse roots: a division and ``exp`` take 10 instructions
    more for each value, which would take longer than its way to and from memory.
    """
    if tanh:
        root = tl.rsqrt(1 + tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * x * x)))
        share = root * root
        slope = share + x * share * (1 - share) * (1.5957691216057308 + 0.21406444881780076 * x * x)
    else:
        root = tl.rsqrt(1 + 0.23164189 * tl.abs(x))
        t = root * root
        bell = tl.exp2(-0.7213475204444817 * x * x)
        tail = 0.1274147960 + t * (-0.1422483680 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
        tail *= t * bell
        share = tl.where(x < 0, tail, 1 - tail)
        slope = share + 0.3989422804014327 * x * bell
    return slope, share


@triton.jit
def gelu(x: tl.tensor, result: tl.tensor, values: tl.tensor, tanh: tl.constexpr, block: tl.constexpr) -> None:
    """Write GeLU of one block of x, contiguous, of so many ``values``."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    held = place < values
    value = tl.load(x + place, mask=held, other=0.0).to(tl.float32)
    share = _slope_and_share(value, tanh)[1]
    tl.store(result + place, (value * share).to(result.dtype.element_ty), mask=held)


@triton.jit
def gelu_gradient(
    grad: tl.tensor,
    x: tl.tensor,
    result: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    of_a_part: tl.tensor,
    tanh: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Write the gradient of some columns of x over ``of_a_part`` rows, and add them up into a row of ``sums``.

    ``grad``, x and ``result`` are [rows, columns], contiguous; ``sums`` [parts, columns] are of the gradient in fp32.
    """
    part = tl.program_id(1)
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    held = lanes < columns
    first, last = part * of_a_part, tl.minimum(part * of_a_part + of_a_part, rows)
    total = tl.zeros([block_rows, block], tl.float32)
    for start in tl.range(first, last, block_rows, num_stages=stages):
        row = start + tl.arange(0, block_rows)
        place, mask = row[:, None].to(tl.int64) * columns + lanes[None, :], (row < last)[:, None] & held[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        change = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        change *= _slope_and_share(value, tanh)[0]
        tl.store(result + place, change.to(result.dtype.element_ty), mask=mask)
        total += change
    tl.store(sums + part.to(tl.int64) * columns + lanes, tl.sum(total, axis=0), mask=held)
