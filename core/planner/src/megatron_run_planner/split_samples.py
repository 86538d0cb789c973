"""Samples that ranks split: what the attention of a layer sends, waits for and holds by each method.

The methods are those of ``parallel-layer=context`` (docs/context.md). Each rank has two pieces of a sample, from its
front and its back, so that all have the same work under a causal mask: a part in C of the attention, which ``ring``
does in C equal steps.

Legend: C context-parallel ranks. ``q`` are the values of a microbatch's queries on a rank, ``kv`` those of its keys and
values together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron_run.contracts.costs import AttentionCosts, LayerCosts, ModelCosts
from megatron_run.contracts.parallel_layer import even_part
from megatron_run.contracts.pieces import Pieces
from megatron_run.errors import InputError, RunError
from megatron_run_planner.devices import Device
from megatron_run_planner.devices.transfers import as_work, exchanged, hop, sum_over
from megatron_run_planner.workload import ContextMethod, ModelSplit

#: Those from which a search chooses.
METHODS: tuple[ContextMethod, ...] = ("ring", "all_gather", "ulysses")
#: Bytes of a 16-bit value, and of an fp32 one: of the gradients of keys and values.
_HALF, _FULL = 2, 4


class Values(NamedTuple):
    """Values of one microbatch on a rank."""

    q: float
    kv: float


def meeting(layer: LayerCosts, split: ModelSplit) -> Iterator[Values]:
    """Those of each attention of ``layer`` whose tokens ranks split; none where a rank has whole samples."""
    rows = split.rows(layer.tokens) / split.tensor
    for part in layer.attentions if split.context > 1 else ():
        yield Values(rows * part.heads * _key_size(part), 2 * rows * part.kv_heads * _key_size(part))


def _key_size(part: AttentionCosts) -> float:
    """Features of a head's key, to which values are padded where they have fewer: ``head_size`` is their mean."""
    return 2 * part.head_size - part.context / part.heads


def short(model: ModelCosts, split: ModelSplit) -> bool:
    """Whether samples are too short for the ranks that split them: by what a start says of it."""
    return Pieces(0, split.context).short(model.sequence)


def why_not(model: ModelCosts, split: ModelSplit) -> str:
    """The reason why ranks cannot split samples of ``model`` as ``split`` has it; empty where they can."""
    try:
        check(model, split)
    except RunError as error:
        return error.what
    return ""


def check(model: ModelCosts, split: ModelSplit) -> None:
    """Raise :class:`InputError` unless tokens, and heads by ``ulysses``, split over ``split.context`` ranks."""
    if split.context == 1:
        return
    if not model.computes_pieces:
        raise InputError(
            f"the model computes whole samples, and parallel.context={split.context} splits their tokens",
            fix="set parallel.context=1, or choose a model that computes pieces, as gpt does",
        )
    tokens = Pieces(0, split.context).part(model.sequence)
    if split.sequence_parallel:
        even_part(tokens, split.tensor, "tokens of train.sequence_length")
    for part in (part for layer in model.kinds.layers for part in layer.attentions):
        if split.method == "ulysses":
            even_part(part.kv_heads // split.tensor, split.context, "key-value heads", "context")


def sent(layer: LayerCosts, split: ModelSplit, width: int) -> tuple[float, float]:
    """Bytes that a rank sends for ``layer`` and a microbatch in values of ``width`` bytes, forward and backward."""
    forward = backward = 0.0
    others = split.context - 1
    for q, kv in meeting(layer, split):
        if split.method == "ulysses":
            ahead = more = others / split.context * (2 * q + kv) * width
        else:  # keys and values come again, and their gradients go home
            ahead, more = others * kv * width, others * kv * (width + max(width, _FULL))
        forward, backward = forward + ahead, backward + more
    return forward, backward


def waits(layer: LayerCosts, split: ModelSplit, device: Device, forward: float, backward: float) -> tuple[float, float]:
    """Seconds in which a rank computes nothing of ``layer``, since messages are on their way, forward and backward.

    Its attention computes for ``forward`` and ``backward`` seconds, beside which messages may travel. On cores that
    ranks share whoever sends computes nothing meanwhile.
    """
    ahead = back = 0.0
    share = 0.0 if device.cores else 1 / split.context
    for each in meeting(layer, split):
        one, two = _WAITS[split.method](each, split, device, forward * share, backward * share)
        ahead, back = ahead + one, back + two
    return as_work(ahead, split, device), as_work(back, split, device)


def _late(message: float, work: float) -> float:
    """How much longer ``message`` takes than the ``work`` beside it."""
    return max(0.0, message - work)


def _ring(each: Values, split: ModelSplit, device: Device, forward: float, backward: float) -> tuple[float, float]:
    """Keys and values travel beside every step but the last; their gradients a step behind, the last ones alone.

    A rank keeps the gradients of its own, of the first step, and can send those of the second beside the third.
    """
    ways, away = split.context, split.tensor * (split.context - 1)  # from the last rank to the first
    keys, grads = (
        hop(device.links, each.kv * width, away, split.ranks) for width in (device.width, max(device.width, _FULL))
    )
    beside = (keys * (step + 1 < ways) + grads * (step > 1) for step in range(ways))
    return (ways - 1) * _late(keys, forward), sum(_late(each, backward) for each in beside) + grads


def _all_gather(
    each: Values, split: ModelSplit, device: Device, forward: float, backward: float
) -> tuple[float, float]:
    """Keys and values come beside the first step, at once; gradients are reduced and scattered when all are there."""

    def half_a_sum(width: int) -> float:
        return sum_over(device, split, split.context * each.kv * width / 2, split.context, split.tensor)

    keys, grads = half_a_sum(device.width), half_a_sum(max(device.width, _FULL))
    return _late(keys, forward), _late(keys, backward) + grads


def _ulysses(each: Values, split: ModelSplit, device: Device, *_beside: float) -> tuple[float, float]:
    """Queries, keys and values are exchanged before the attention, and its result after it."""
    seconds = sum(
        exchanged(values * device.width, split, device, split.context, split.tensor)
        for values in (each.q + each.kv, each.q)
    )
    return seconds, seconds


_WAITS: dict[ContextMethod, Callable[..., tuple[float, float]]] = {
    "ring": _ring,
    "all_gather": _all_gather,
    "ulysses": _ulysses,
}


def kept(layer: LayerCosts, split: ModelSplit) -> float:
    """Bytes of a microbatch that ``layer`` keeps until its backward beyond a part in C of what it keeps of samples.

    They are the angles by which a rank's own tokens turn. ``ulysses`` keeps what it gave and got: the attention's
    result twice, but no queries and keys from before turning.
    """
    if split.context == 1:
        return 0.0
    found = 0.0
    for (q, kv), part in zip(meeting(layer, split), layer.attentions, strict=True):
        found += part.rotary * layer.tokens / split.context * part.head_size
        if split.method == "ulysses":
            found += q - part.rotary * (q + kv / 2)
    return _HALF * found


def taken(layer: LayerCosts, split: ModelSplit) -> float:
    """Bytes that the backward of the attention of ``layer`` holds for itself, at most.

    There are gradients of queries in fp32 beside those of the result, and keys and values as they were sent. Most is
    there while a pair is computed, with its operands and the gradients before it; or when the last gradients of keys
    and values come home, and are joined and narrowed. ``ulysses`` takes no more than any other part of a layer does.
    """
    most = 0.0
    for q, kv in meeting(layer, split):
        if split.method != "ulysses":
            halves = _taken_by_ring if split.method == "ring" else _taken_by_all_gather
            most = max(most, _HALF * halves(q, kv, split.context))
    return most


def _taken_by_ring(q: float, kv: float, ways: int) -> float:
    """Halves: a part that is computed with, one that comes, and fp32 gradients: of home, of two parts, a message."""
    parts, gradients = 1 + (ways > 3), 4 if ways > 2 else 2
    return 3 * q + kv + max((parts + 2 * gradients) * kv + _pair(q, kv), 10 * kv)


def _taken_by_all_gather(q: float, kv: float, ways: int) -> float:
    """Halves: all parts and all their gradients in fp32, which are copied to be sent."""
    return 3 * q + kv + max(3 * ways * kv + _pair(q, kv), (5 * ways + 2) * kv)


def _pair(q: float, kv: float) -> float:
    """Halves of a pair of pieces: its operands and the gradient of its result, its gradients and those before."""
    return (3 * q + kv) / 2 + (q + kv)
