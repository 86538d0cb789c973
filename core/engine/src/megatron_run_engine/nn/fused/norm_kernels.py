"""The kernel of :mod:`norm_rows`, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_gradient(
    x: tl.tensor,
    grad: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    beside: tl.tensor,
    result: tl.tensor,
    of_weight: tl.tensor,
    of_bias: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    centred: tl.constexpr,
    adds: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Write the gradient of rows of x, and add up those of weight and bias over all rows of this program.

    A row is read once: x, grad, ``beside`` and ``result`` are [rows, columns], contiguous; ``mean`` and ``scale``,
    which is 1/deviation, [rows]. ``of_weight`` and ``of_bias`` [programs, columns] get a row of sums of each program. A
    norm that is not ``centred`` has no mean and no bias; one that ``adds`` adds ``beside`` to the gradient. The next
    rows, ``stages`` - 1 blocks, are on their way while the sums of one are waited for.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, block)
    held = lanes < columns
    factor = tl.load(weight + lanes, mask=held, other=0.0).to(tl.float32)[None, :]
    weight_sums = tl.zeros([block_rows, block], tl.float32)
    bias_sums = tl.zeros([block_rows, block], tl.float32)
    for start in tl.range(program * block_rows, rows, programs * block_rows, num_stages=stages):
        row = start + tl.arange(0, block_rows)
        real = row < rows
        place, mask = row[:, None].to(tl.int64) * columns + lanes[None, :], real[:, None] & held[None, :]
        slope = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        normal = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        if adds:
            other = tl.load(beside + place, mask=mask, other=0.0).to(tl.float32)
        by = tl.load(scale + row, mask=real, other=0.0)[:, None]
        if centred:
            normal = tl.where(mask, normal - tl.load(mean + row, mask=real, other=0.0)[:, None], 0.0)
            bias_sums += slope
        normal *= by
        weight_sums += slope * normal
        slope *= factor
        if centred:  # both sums of a row at once: the warps wait for each other once
            along, level = tl.split(tl.sum(tl.join(normal * slope, slope), axis=1))
            change = slope - normal * (along / columns)[:, None] - (level / columns)[:, None]
        else:
            change = slope - normal * (tl.sum(normal * slope, axis=1) / columns)[:, None]
        change *= by
        if adds:
            change += other
        tl.store(result + place, change.to(result.dtype.element_ty), mask=mask)
    own = program.to(tl.int64) * columns + lanes
    tl.store(of_weight + own, tl.sum(weight_sums, axis=0), mask=held)
    if centred:
        tl.store(of_bias + own, tl.sum(bias_sums, axis=0), mask=held)
