"""The kernels of :mod:`gate` and :mod:`rotation`, in Triton; both compute in fp32 and round once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu(x: tl.tensor, result: tl.tensor, row_stride: tl.tensor, features: tl.tensor, block: tl.constexpr) -> None:
    """Write ``silu(gate) * up`` for one block of a row of x [N, 2f], which holds gate then up."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * block + tl.arange(0, block)
    held = lanes < features
    gate = tl.load(x + row * row_stride + lanes, mask=held, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + features + lanes, mask=held, other=0.0).to(tl.float32)
    tl.store(result + row * features + lanes, (gate * tl.sigmoid(gate) * up).to(result.dtype.element_ty), mask=held)


@triton.jit
def swiglu_gradient(
    grad: tl.tensor,
    x: tl.tensor,
    result: tl.tensor,
    grad_stride: tl.tensor,
    row_stride: tl.tensor,
    features: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Write the gradients of gate and up into ``result`` [N, 2f], as they lie in x."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * block + tl.arange(0, block)
    held = lanes < features
    gate = tl.load(x + row * row_stride + lanes, mask=held, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + features + lanes, mask=held, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * grad_stride + lanes, mask=held, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = slope * up * share * (1 + gate * (1 - share))
    kind = result.dtype.element_ty
    tl.store(result + row * 2 * features + lanes, of_gate.to(kind), mask=held)
    tl.store(result + row * 2 * features + features + lanes, (slope * gate * share).to(kind), mask=held)


@triton.jit
def rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    result: tl.tensor,
    sequence_stride: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    cos_sequence_stride: tl.tensor,
    cos_batch_stride: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    features: tl.tensor,
    rotated: tl.tensor,
    direction: tl.constexpr,
    block_heads: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Rotate some heads of one token: pairs of features j and j + ``rotated``, by the angle times ``direction``.

    x is [s, b, n, d] with strides, ``result`` contiguous; what lies behind 2 * ``rotated`` features is copied.
    """
    token = tl.program_id(0)
    place, text = (token // batch).to(tl.int64), (token % batch).to(tl.int64)
    # 64 bits: where heads lie outermost, those from the 65th on are 2^31 values away in long sequences.
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads)).to(tl.int64)
    lanes = tl.arange(0, block)
    of_angle = place * cos_sequence_stride + text * cos_batch_stride + lanes
    c = tl.load(cos + of_angle, mask=lanes < rotated, other=0.0).to(tl.float32)[None, :]
    s = direction * tl.load(sin + of_angle, mask=lanes < rotated, other=0.0).to(tl.float32)[None, :]
    source = x + place * sequence_stride + text * batch_stride + head[:, None] * head_stride + lanes[None, :]
    target = result + (token.to(tl.int64) * heads + head[:, None]) * features + lanes[None, :]
    real = head[:, None] < heads
    mask = real & (lanes < rotated)[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + rotated, mask=mask, other=0.0).to(tl.float32)
    kind = result.dtype.element_ty
    tl.store(target, (first * c - second * s).to(kind), mask=mask)
    tl.store(target + rotated, (second * c + first * s).to(kind), mask=mask)
    for start in range(2 * rotated, features, block):
        rest = real & (start + lanes < features)[None, :]
        tl.store(target + start, tl.load(source + start, mask=rest, other=0.0), mask=rest)
