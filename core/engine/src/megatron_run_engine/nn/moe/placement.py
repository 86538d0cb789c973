"""Where each token's copies lie once they are sorted by expert: maps that no one but the device reads.

An assignment is a token with one of its chosen experts: number ``token * k + choice`` of n*k.

Legend: n tokens, e experts, k experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_run_engine.nn.moe.moe_spec import ExpertSpec


class Placement(NamedTuple):
    """``order`` [n*k] lists assignments by expert, those of a token that was dropped last; ``place`` [n*k] inverts it.

    ``counts`` [e] are the assignments that each expert takes. All int64.
    """

    order: Tensor
    place: Tensor
    counts: Tensor


def place_all(chosen: Tensor, load: Tensor) -> Placement:
    """Every expert takes what it is given: ``chosen`` [n, k], and ``load`` [e], how often each was chosen."""
    order = chosen.flatten().argsort(stable=True)
    return Placement(order, _inverse(order), load.clone())  # a captured segment hands out none of its inputs


def place_within_capacity(chosen: Tensor, weights: Tensor, load: Tensor, spec: ExpertSpec) -> Placement:
    """No expert takes more than its capacity: of the rest, those with the least weight or the last are dropped.

    ``chosen`` and ``weights`` are [n, k], ``load`` [e].
    """
    capacity, experts = spec.capacity(len(chosen)), chosen.flatten()
    by_expert = _by_expert(experts, weights.detach().flatten() if spec.drop == "probs" else None)
    sorted_experts = experts[by_expert]
    rank = torch.arange(len(experts), device=experts.device) - (load.cumsum(0) - load)[sorted_experts]
    key = torch.where(rank < capacity, sorted_experts, len(load))  # the dropped go behind the last expert
    order = by_expert[key.argsort(stable=True)]
    return Placement(order, _inverse(order), load.clamp(max=capacity))


def spread(load: Tensor, counts: Tensor) -> Tensor:
    """The fullest and the emptiest expert's tokens over the mean, and the dropped share of all, fp32 [3].

    ``load`` [e] are the tokens that chose each expert, ``counts`` [e] those that it takes.
    """
    chosen = load.float()
    total = chosen.sum()
    return torch.stack([*(torch.stack(chosen.aminmax()[::-1]) * len(load) / total), 1 - counts.sum() / total])


def _by_expert(experts: Tensor, weights: Tensor | None) -> Tensor:
    """Assignments by expert, within each by falling weight or, without weights, by token."""
    if weights is None:
        return experts.argsort(stable=True)
    by_weight = weights.argsort(stable=True, descending=True)
    return by_weight[experts[by_weight].argsort(stable=True)]


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
