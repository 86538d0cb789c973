"""Sorting tokens by expert: index maps that stay on the device, and the row copies and sums that use them.

An assignment is a token together with one of its chosen experts; it has the number ``token * k + choice`` of n*k.

Legend: n tokens, e experts, k experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from megatron_run_engine.nn.spec import ExpertSpec


class Placement(NamedTuple):
    """``order`` [n*k] sorts assignments by expert, dropped ones last; ``place`` [n*k] is its inverse permutation.

    ``counts`` [e] is the number of assignments that each expert accepts. All are int64. In a padded placement every
    expert has as many slots, s of them together: ``order`` [s] names the assignment in each, n*k where it is empty, and
    ``place`` [n*k] the slot of each assignment, s where it was dropped.
    """

    order: Tensor
    place: Tensor
    counts: Tensor


def place_all(chosen: Tensor, load: Tensor) -> Placement:
    """Placement without a capacity: ``chosen`` [n, k], and ``load`` [e], how often each expert was chosen."""
    order = chosen.flatten().argsort(stable=True)
    return Placement(order, _inverse(order), load.clone())  # a copy: a captured segment may not return an input


def place_within_capacity(chosen: Tensor, weights: Tensor, load: Tensor, spec: ExpertSpec) -> Placement:
    """Placement in which no expert accepts more than its capacity; ``spec.drop`` selects which ones are dropped.

    ``chosen`` and ``weights`` are [n, k], ``load`` is [e]. Shapes do not depend on the routing, so that the segment can
    be captured.
    """
    capacity, experts = spec.capacity(len(chosen)), chosen.flatten()
    by_expert = _by_expert(experts, weights.detach().flatten() if spec.drop == "probs" else None)
    sorted_experts = experts[by_expert]
    # The rank of an assignment within its expert: its position minus that of the expert's first.
    rank = torch.arange(len(experts), device=experts.device) - (load.cumsum(0) - load)[sorted_experts]
    key = torch.where(rank < capacity, sorted_experts, len(load))  # the dropped go behind the last expert
    order = by_expert[key.argsort(stable=True)]
    return Placement(order, _inverse(order), load.clamp(max=capacity))


def padded(placement: Placement, capacity: int) -> Placement:
    """``placement`` with ``capacity`` slots for each expert, none of which accepts more: shapes without a routing."""
    order, _, counts = placement
    ranks = torch.arange(capacity, device=order.device)
    sources = (counts.cumsum(0) - counts)[:, None] + ranks  # [e, capacity]: places in order
    filled = order[sources.clamp(max=len(order) - 1)]
    slots = torch.where(ranks < counts[:, None], filled, len(order)).flatten()
    place = slots.new_full((len(order) + 1,), len(slots))  # the last one takes what the empty slots write
    place.scatter_(0, slots, torch.arange(len(slots), device=order.device))
    return Placement(slots, place[:-1].clone(), counts)


def spread(load: Tensor, counts: Tensor) -> Tensor:
    """Tokens of the fullest and of the emptiest expert over the mean, and the dropped share of all: fp32 [3].

    ``load`` [e] is the number of tokens that chose each expert, ``counts`` [e] the number that it accepts.
    """
    chosen = load.float()
    total = chosen.sum()
    return torch.stack([*(torch.stack(chosen.aminmax()[::-1]) * len(load) / total), 1 - counts.sum() / total])


def _by_expert(experts: Tensor, weights: Tensor | None) -> Tensor:
    """Assignments sorted by expert, within an expert by decreasing weight or, without weights, by token.

    Two stable sorts give the lexicographic order of (expert, -weight).
    """
    if weights is None:
        return experts.argsort(stable=True)
    by_weight = weights.argsort(stable=True, descending=True)
    return by_weight[experts[by_weight].argsort(stable=True)]


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def copy_rows(tokens: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """One row per assignment, in ``order`` [n*k]: tokens [n, h] -> [n*k, h].

    ``place`` is the inverse of ``order``: the backward gathers with it, which sums in a fixed order; ``index_add``
    would not on CUDA.
    """
    rows: Tensor = _Copy.apply(tokens, order, place)  # type: ignore[no-untyped-call]  # torch's
    return rows


def copy_to_slots(tokens: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """One row per slot of a padded placement, zeros in empty ones: tokens [n, h] -> [s, h]."""
    rows: Tensor = _CopyToSlots.apply(tokens, order, place)  # type: ignore[no-untyped-call]  # torch's
    return rows


def kept_rows(rows: Tensor, kept: int) -> Tensor:
    """The first ``kept`` rows, without those of dropped assignments: [n*k, h] -> [m, h], m = ``kept``."""
    return rows if len(rows) == kept else rows[:kept]  # the backward of a part copies, even of all


def pad_rows(rows: Tensor, total: int) -> Tensor:
    """Zeros for dropped assignments: [m, h] -> [n*k, h], a shape that does not depend on the routing."""
    return rows if len(rows) == total else F.pad(rows, (0, 0, 0, total - len(rows)))


def combine_rows(rows: Tensor, weights: Tensor, order: Tensor, place: Tensor, *, slots: bool = False) -> Tensor:
    """Each token's weighted sum of its k rows: rows [n*k, h] in ``order``, weights [n, k] -> [n, h].

    With ``slots`` the rows [s, h] are those of a padded placement.
    """
    sums: Tensor = _Combine.apply(rows, weights, order, place, slots)  # type: ignore[no-untyped-call]  # torch's
    return sums


def sum_rows(rows: Tensor, weights: Tensor, origin: Tensor, tokens: int) -> Tensor:
    """Each token's weighted sum of this rank's rows: rows [m, h], weights [m], tokens ``origin`` [m] -> [n, h].

    A token's terms are added in fp32, in the order of the rows, and the sum is rounded once, as in
    :func:`combine_rows`. On CUDA the order varies unless deterministic algorithms are enabled.
    """
    sums: Tensor = _Add.apply(rows, weights, origin, tokens)  # type: ignore[no-untyped-call]  # torch's
    return sums


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, order // (len(order) // len(tokens)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place,), (grad,) = ctx.saved_tensors, grads
        copies = grad.index_select(0, place)  # [n*k, h] by token
        return copies.view(ctx.tokens, -1, copies.shape[1]).sum(1), None, None


class _CopyToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.tokens = len(tokens)
        return _rows_or_zeros(tokens, order // (len(place) // len(tokens)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place,), (grad,) = ctx.saved_tensors, grads
        return _rows_or_zeros(grad, place).view(ctx.tokens, -1, grad.shape[1]).sum(1), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, place: Tensor, slots: bool) -> Tensor:
        ctx.save_for_backward(rows, weights, order, place)
        ctx.slots = slots
        return torch.bmm(weights.to(rows.dtype)[:, None], _by_token(rows, place, weights, slots=slots))[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (rows, weights, order, place), (grad,) = ctx.saved_tensors, grads
        by_token = _by_token(rows, place, weights, slots=ctx.slots)
        grad_weights = torch.bmm(by_token, grad[:, :, None])[:, :, 0]  # [n, k]
        tokens = order // weights.shape[1]
        # [n, h] -> [n*k, h] or [s, h], a copy
        grad_rows = _rows_or_zeros(grad, tokens) if ctx.slots else grad.index_select(0, tokens)
        assigned = order.clamp(max=weights.numel() - 1) if ctx.slots else order
        grad_rows *= weights.flatten()[assigned].to(rows.dtype)[:, None]
        return grad_rows, grad_weights.to(weights.dtype), None, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, origin: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(rows, weights, origin)
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = rows.new_zeros(tokens, rows.shape[1], dtype=wide)
        return sums.index_add_(0, origin, rows.to(wide) * weights.to(rows.dtype)[:, None]).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (rows, weights, origin), (grad,) = ctx.saved_tensors, grads
        grad_rows = grad.index_select(0, origin)
        grad_weights = torch.bmm(rows[:, None], grad_rows[:, :, None])[:, 0, 0]
        grad_rows *= weights.to(rows.dtype)[:, None]
        return grad_rows, grad_weights.to(weights.dtype), None, None


def _by_token(rows: Tensor, place: Tensor, weights: Tensor, *, slots: bool) -> Tensor:
    """[n*k, h] or, in ``slots``, [s, h] -> [n, k, h]."""
    taken = _rows_or_zeros(rows, place) if slots else rows.index_select(0, place)
    return taken.view(*weights.shape, -1)


def _rows_or_zeros(rows: Tensor, index: Tensor) -> Tensor:
    """``rows`` [m, h] at ``index``, a copy; zeros where it is m."""
    beyond = (index == len(rows))[:, None]
    return rows.index_select(0, index.clamp(max=len(rows) - 1)).masked_fill_(beyond, 0)
