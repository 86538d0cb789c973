"""The kernel of :mod:`one_pass`, in Triton. It computes in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update(
    stretches: tl.tensor,
    owners: tl.tensor,
    rates: tl.tensor,
    factor: tl.tensor,
    kind: tl.constexpr,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    eps: tl.constexpr,
    scaled: tl.constexpr,
    decoupled: tl.constexpr,
    rounded: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Update one block of a stretch.

    ``stretches`` [n, 7], int64, holds for each the number of its values, the number of its first block, and the
    addresses of values, gradients, both moments and parameters of type ``kind`` (read only if ``rounded``);
    ``owners`` [blocks], int32, to which stretch a block belongs. ``rates`` [n, 4], fp32: weight decay as a share of
    the gradient and of the value, the rate over the first moment's correction, and the reciprocal root of the
    second's. Gradients are multiplied by ``factor`` [1] if ``scaled``.
    """
    this = tl.program_id(0)
    owner = tl.load(owners + this)
    stretch, rate = stretches + owner * 7, rates + owner * 4
    # Every stretch begins and ends at a multiple of ALIGNMENT values. For wide loads the compiler must know 16 bytes of
    # it, and that the mask does not end within what a thread loads.
    lanes = (this - tl.load(stretch + 1)) * block + tl.arange(0, block)
    held = lanes < tl.multiple_of(tl.load(stretch), 16)
    value_at = tl.multiple_of(tl.load(stretch + 2).to(tl.pointer_type(tl.float32)), 16) + lanes
    grad_at = tl.multiple_of(tl.load(stretch + 3).to(tl.pointer_type(tl.float32)), 16) + lanes
    first_at = tl.multiple_of(tl.load(stretch + 4).to(tl.pointer_type(tl.float32)), 16) + lanes
    second_at = tl.multiple_of(tl.load(stretch + 5).to(tl.pointer_type(tl.float32)), 16) + lanes
    value = tl.load(value_at, mask=held, other=0.0)
    grad = tl.load(grad_at, mask=held, other=0.0)
    first = tl.load(first_at, mask=held, other=0.0)
    second = tl.load(second_at, mask=held, other=0.0)
    if scaled:
        grad = grad * tl.load(factor)
    if decoupled:
        value = value - tl.load(rate + 1) * value
    else:
        grad = grad + tl.load(rate) * value
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad * grad
    value = value - tl.load(rate + 2) * first / (tl.sqrt(second) * tl.load(rate + 3) + eps)
    tl.store(value_at, value, mask=held)
    tl.store(first_at, first, mask=held)
    tl.store(second_at, second, mask=held)
    if rounded:
        parameter_at = tl.multiple_of(tl.load(stretch + 6).to(tl.pointer_type(kind)), 16) + lanes
        tl.store(parameter_at, value.to(kind), mask=held)
