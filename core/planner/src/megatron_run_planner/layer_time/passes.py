"""Passes over memory that this project's own layers make on a GPU beside products and attention, counted in its code.

A pass is a kernel that reads and writes its tensors once. Without ``kernels``, those of
``megatron_run_engine.nn.fused``, each operation of torch is a pass.

Legend: ``n`` = ``s b`` tokens, ``h`` hidden, ``f`` feed-forward size, ``t`` tensor-parallel size.
Values are of two bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_run.contracts.costs import AttentionCosts, FeedForwardCosts, LayerCosts, SegmentCosts
from megatron_run_planner.split_samples import meeting
from megatron_run_planner.workload import ModelSplit

_WIDTH = 2
#: Bytes of a logit in the loss. By kernels: read forward; read and overwritten by its gradient backward. Without,
#: forward: widened (2 + 4), the largest found (4), subtracted (8), times log2 e (8), exponential (8), summed (4);
#: backward: the same but for maximum and sum, then scaled (8) and narrowed (6).
_LOSS = {True: (2.0, 4.0), False: (38.0, 44.0)}
#: Bytes of a parameter in an update. Gradients in fp32 are cleared (4) and squared (4). By a kernel: AdamW reads and
#: writes master and both moments, reads the gradient and writes the weight (30). Without: it reads and writes the
#: gradient too, which it unscales and clips (32), and weights are cast (6).
CLEARED, UPDATED = 4.0, {True: 34.0, False: 42.0}
#: Bytes of a gradient that a rank adds to those that it has of microbatches before, both in fp32.
SUMMED = 12.0
#: Bytes of a value of queries where the attention to another piece joins the one so far, in fp32: both are scaled and
#: added. And of a gradient in 16 bits that is added to one in fp32.
_JOINED, _ADDED = 34.0, 10.0
#: Kernels of a pair of pieces, forward and backward.
_PAIR = (12, 10)
#: Kernels of a layer's forward and backward that move next to nothing: the profile of a step of 24 layers and four
#: microbatches had 6,872, of which a layer's products, attention and passes are 33.
_SMALL = (9, 27)


class Pass(NamedTuple):
    """Bytes that are read and written in a ``forward`` and in a ``backward``, by ``ahead`` and by ``back`` kernels."""

    forward: float
    backward: float
    ahead: int = 1
    back: int = 1


def layer_passes(layer: LayerCosts, split: ModelSplit, *, kernels: bool) -> Iterator[Pass]:
    """Those of one layer on one rank."""
    t, tokens = split.tensor, split.rows(layer.tokens)
    whole = _WIDTH * tokens * layer.hidden
    stream = whole / (t if split.sequence_parallel else 1)
    for part in layer.parts:
        yield norm_pass(stream, kernels=kernels)
        yield Pass(3 * stream, 3 * stream)  # the sum, and in the backward that of its two gradients
        if layer.dropout:  # with a mask of a byte a value
            yield Pass(2.5 * stream, 2.5 * stream)
        match part:
            case AttentionCosts():
                yield from _attention_passes(part, _WIDTH * tokens / t, kernels=kernels)
            case FeedForwardCosts():
                yield from _feed_passes(_WIDTH * tokens * part.routed * part.features / t, part, kernels=kernels)
                if part.experts:
                    moved = 2 * _WIDTH * tokens * part.routed * layer.hidden
                    yield Pass(2 * moved, 2 * moved, 2, 2)  # rows for experts, and their weighted sums
                    yield from _feed_passes(_WIDTH * tokens * part.shared / t, part, kernels=kernels)
            case SegmentCosts():
                swept = _WIDTH * tokens * part.moved / t
                yield Pass(swept, 2 * swept, part.kernels, 2 * part.kernels)
    if layer.biased:
        yield _bias_pass(layer, _WIDTH * tokens / t, stream, kernels=kernels)
    yield Pass(0.0, 0.0, *_SMALL)


def _attention_passes(part: AttentionCosts, value: float, *, kernels: bool) -> Iterator[Pass]:
    """Those of attention to a layer's own tokens, whose features take ``value`` bytes each; others are not counted."""
    if part.across:
        return
    yield Pass(0.0, 2 * value * part.columns, 0, 1)  # the gradients of queries, keys and values become one
    if part.rotary:
        turned = value * (part.columns - part.kv_heads * part.head_size)
        ways = 1 if kernels else 3  # both halves times cosine and sine, and their sums
        yield Pass(2 * turned * ways, 2 * turned * (ways + 1), ways, ways + 1)  # those of queries and keys before


def _bias_pass(layer: LayerCosts, value: float, stream: float, *, kernels: bool) -> Pass:
    """The gradients of biases: sums over tokens, of which the kernel of GeLU's backward makes one as it writes."""
    summed = kernels and all(part.matrices == 2 and not part.experts for part in layer.feeds)
    features: float = sum(part.columns for part in layer.attentions if not part.across)
    features += 0.0 if summed else sum(part.features * (part.matrices - 1) for part in layer.feeds)
    return Pass(0.0, features * value + 2 * stream, 0, 3 if summed else 4)


def _feed_passes(features: float, part: FeedForwardCosts, *, kernels: bool) -> Iterator[Pass]:
    """The activation of a feed-forward layer whose inner values have ``features`` bytes."""
    if not features:
        return
    if part.matrices == 2:
        yield Pass(2 * features, 3 * features)
    elif kernels and not part.keeps_gate:
        yield Pass(3 * features, 5 * features)
    else:  # the gate's activation and a product; backward that again, two products and the activation's gradient
        yield Pass(5 * features, 11 * features, 2, 4)


def joining_passes(layer: LayerCosts, split: ModelSplit) -> Iterator[Pass]:
    """Those by which attention to pieces of samples becomes that to whole ones, in ``parallel-layer=context``.

    A rank's own two pieces make three pairs of queries and keys, those of each other rank two.
    """
    pairs = split.context + 0.5  # of a rank's queries, of which a piece is half
    for q, kv in meeting(layer, split):
        if split.method == "ulysses":  # heads of all ranks are joined to be sent, then in the order of tokens; and back
            copied = 3 * 2 * _WIDTH * (2 * q + kv)
            yield Pass(copied, copied, 6, 6)
            continue
        ahead = pairs * (_JOINED * q + 2 * _WIDTH * (q + kv))
        back = pairs * (_ADDED * (q + kv) + 2 * _WIDTH * (3 * q + kv)) + split.context * 3 * 2 * _WIDTH * kv
        yield Pass(ahead, back, *(round(2 * pairs) * kernels for kernels in _PAIR))


def norm_pass(stream: float, *, kernels: bool) -> Pass:
    """A norm of the residual stream: its backward reads both tensors once more without kernels, for the weights."""
    return Pass(2 * stream, (3 if kernels else 5) * stream, 1, 1 if kernels else 2)


def loss_pass(tokens: float, columns: float, *, kernels: bool) -> Pass:
    """The loss of ``tokens`` over so many ``columns`` of logits."""
    forward, backward = _LOSS[kernels]
    return Pass(forward * tokens * columns, backward * tokens * columns, *((1, 1) if kernels else (8, 6)))
