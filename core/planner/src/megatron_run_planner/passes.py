"""Passes over memory that this project's own layers make on a GPU beside products and attention, counted in its code.

A pass is a kernel that reads and writes its tensors once. Without ``kernels``, those of
``megatron_run_engine.nn.fused``, each operation of torch is a pass.

Legend: ``n`` = ``s b`` tokens, ``h`` hidden, ``f`` feed-forward size, ``t`` tensor-parallel size.
Values are of two bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_run_planner.workload import Model, Split

_WIDTH = 2
#: Bytes of a logit in the loss. By kernels: read forward; read and overwritten by its gradient backward. Without,
#: forward: widened (2 + 4), the largest found (4), subtracted (8), times log2 e (8), exponential (8), summed (4);
#: backward: the same but for maximum and sum, then scaled (8) and narrowed (6).
_LOSS = {True: (2.0, 4.0), False: (38.0, 44.0)}
#: Bytes of a parameter in an update. Gradients in fp32 are cleared (4) and squared (4). By a kernel: AdamW reads and
#: writes master and both moments, reads the gradient and writes the weight (30). Without: it reads and writes the
#: gradient too, which it unscales and clips (32), and weights are cast (6).
CLEARED, UPDATED = 4.0, {True: 34.0, False: 42.0}


#: Kernels of a layer's forward and backward that move next to nothing: the profile of a step of 24 layers and four
#: microbatches had 6,872, of which a layer's products, attention and passes are 33.
_SMALL = (9, 27)


class Pass(NamedTuple):
    """Bytes that are read and written in a ``forward`` and in a ``backward``, by ``ahead`` and by ``back`` kernels."""

    forward: float
    backward: float
    ahead: int = 1
    back: int = 1


def layer_passes(model: Model, split: Split, *, kernels: bool) -> Iterator[Pass]:
    """Those of one layer of one kind on one rank."""
    t, tokens = split.tensor, split.micro_batch * model.sequence
    whole = _WIDTH * tokens * model.hidden
    stream = whole / (t if split.sequence_parallel else 1)
    halves = 3 if model.across else 2
    yield from (norm_pass(stream, kernels=kernels) for _ in range(halves))
    for _ in range(halves):  # the sum, and in the backward that of its two gradients
        yield Pass(3 * stream, 3 * stream)
        if model.dropout:  # with a mask of a byte a value
            yield Pass(2.5 * stream, 2.5 * stream)
    routed = tokens * max(1, model.top_k) if model.experts else tokens
    yield from _feed_passes(_WIDTH * routed * model.ffn_width / t, model, kernels=kernels)
    if model.experts:
        moved = 2 * _WIDTH * routed * model.hidden
        yield Pass(2 * moved, 2 * moved, 2, 2)  # rows for experts, and their weighted sums
        yield from _feed_passes(_WIDTH * tokens * model.shared_ffn / t, model, kernels=kernels)
    joined = _WIDTH * tokens * model.qkv_width / t
    yield Pass(0.0, 2 * joined, 0, 1)  # the gradients of queries, keys and values become one
    if model.rotary:
        turned = _WIDTH * tokens * (model.qkv_width - (model.kv_heads or model.heads) * model.head_size) / t
        ways = 1 if kernels else 3  # both halves times cosine and sine, and their sums
        yield Pass(2 * turned * ways, 2 * turned * (ways + 1), ways, ways + 1)  # those of queries and keys before
    if model.biased:  # their gradients are sums over tokens; the kernel of GeLU's backward sums what it writes
        summed = kernels and not model.gated and not model.experts
        features = model.qkv_width + (0 if summed else model.ffn_width * (model.matrices - 1))
        yield Pass(0.0, features / t * _WIDTH * tokens + 2 * stream, 0, 3 if summed else 4)
    yield Pass(0.0, 0.0, *_SMALL)


def _feed_passes(features: float, model: Model, *, kernels: bool) -> Iterator[Pass]:
    """The activation of a feed-forward layer whose inner values have ``features`` bytes."""
    if not features:
        return
    if not model.gated:
        yield Pass(2 * features, 3 * features)
    elif kernels and not model.keeps_gate:
        yield Pass(3 * features, 5 * features)
    else:  # the gate's activation and a product; backward that again, two products and the activation's gradient
        yield Pass(5 * features, 11 * features, 2, 4)


def norm_pass(stream: float, *, kernels: bool) -> Pass:
    """A norm of the residual stream: its backward reads both tensors once more without kernels, for the weights."""
    return Pass(2 * stream, (3 if kernels else 5) * stream, 1, 1 if kernels else 2)


def loss_pass(tokens: float, columns: float, *, kernels: bool) -> Pass:
    """The loss of ``tokens`` over so many ``columns`` of logits."""
    forward, backward = _LOSS[kernels]
    return Pass(forward * tokens * columns, backward * tokens * columns, *((1, 1) if kernels else (8, 6)))
