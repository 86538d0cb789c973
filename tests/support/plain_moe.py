"""A mixture of experts written out token by token: the reference for ours, sharing no code with it.

Everything is in whatever dtype the weights have; ``options`` are those of model gpt.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]


class Mixed(NamedTuple):
    """``out`` as the input, the auxiliary losses without coefficients, and how many of all assignments were dropped.

    ``load`` is how often each expert was chosen.
    """

    out: Tensor
    balance: Tensor
    z: Tensor
    dropped: int
    load: list[int]


def mixture(weights: Weights, y: Tensor, options: Any) -> Mixed:
    """Tokens [b, s, h] after the norm. ``weights`` by name within the layer; positions count along s, then b."""
    tokens = y.transpose(0, 1).reshape(-1, y.shape[-1])
    logits = tokens @ weights["router.weight"].T
    choices = [_choose(row, weights.get("router.expert_bias"), options) for row in logits]
    kept = _kept(choices, options)
    rows = []
    for number, (token, chosen) in enumerate(zip(tokens, choices, strict=True)):
        made = [
            weight * _expert(weights, f"experts.{{}}.{e}", token, options)
            for e, weight in chosen
            if (number, e) in kept
        ]
        out = torch.stack(made).sum(0) if made else torch.zeros_like(token)
        rows.append(out + _shared(weights, token, options))
    out = torch.stack(rows).view(y.shape[1], y.shape[0], -1).transpose(0, 1)
    balance = _balance(logits, choices, options)
    load = [sum(e == expert for chosen in choices for e, _ in chosen) for expert in range(options.experts.count)]
    return Mixed(out, balance, torch.logsumexp(logits, -1).pow(2).mean(), sum(load) - len(kept), load)


def _choose(row: Tensor, bias: Tensor | None, options: Any) -> list[tuple[int, Tensor]]:
    """The experts of one token with their weights, from its logits [e]."""
    sigmoid = options.experts.router.score_function == "sigmoid"
    scores = (torch.sigmoid(row) if sigmoid else torch.softmax(row, -1)).tolist()
    if bias is not None:
        scores = [score + moved for score, moved in zip(scores, bias.tolist(), strict=True)]
    size = len(scores) // options.experts.router.groups
    groups = [range(first, first + size) for first in range(0, len(scores), size)]
    if options.experts.router.groups > 1:
        best = options.experts.router.group_best
        groups.sort(key=lambda group: -sum(sorted(scores[e] for e in group)[-best:]))
        groups = groups[: options.experts.router.top_groups]
    numbers = sorted((e for group in groups for e in group), key=lambda e: -scores[e])[: options.experts.top_k]
    if sigmoid:
        weights = [torch.sigmoid(row[e]) for e in numbers]
        if options.experts.top_k > 1 and options.experts.router.norm_weights:
            weights = [weight / torch.stack(weights).sum() for weight in weights]
    else:
        among = row if options.experts.router.pre_softmax else row[numbers]
        weights = [torch.exp(row[e]) / torch.exp(among).sum() for e in numbers]
    return [(e, options.experts.router.scaling_factor * weight) for e, weight in zip(numbers, weights, strict=True)]


def _kept(choices: list[list[tuple[int, Tensor]]], options: Any) -> set[tuple[int, int]]:
    """(token, expert) of everything that a full expert does not drop."""
    kept = set()
    for expert in range(options.experts.count):
        mine = [(token, weight.item()) for token, chosen in enumerate(choices) for e, weight in chosen if e == expert]
        if options.experts.capacity_factor is not None:
            if options.experts.drop_policy == "probs":
                mine.sort(key=lambda item: -item[1])
            even = len(choices) * options.experts.top_k / options.experts.count
            mine = mine[: math.ceil(even * options.experts.capacity_factor)]
        kept |= {(token, expert) for token, _ in mine}
    return kept


def _balance(logits: Tensor, choices: list[list[tuple[int, Tensor]]], options: Any) -> Tensor:
    if options.experts.router.score_function == "sigmoid":
        scores = torch.sigmoid(logits) / torch.sigmoid(logits).sum(-1, keepdim=True)
    else:
        scores = torch.softmax(logits, -1)
    total = logits.new_zeros(())
    for expert in range(options.experts.count):
        share = sum(e == expert for chosen in choices for e, _ in chosen) / (len(choices) * options.experts.top_k)
        total = total + options.experts.count * share * scores[:, expert].mean()
    return total


def _expert(weights: Weights, prefix: str, token: Tensor, options: Any) -> Tensor:
    """``prefix`` has a place for ``input`` and ``output``."""

    def linear(name: str, x: Tensor) -> Tensor:
        y = weights[f"{name}.weight"] @ x
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    up = linear(prefix.format("input") + ".up", token)
    inner = (
        F.silu(linear(prefix.format("input") + ".gate", token)) * up if options.activation == "swiglu" else F.gelu(up)
    )
    return linear(prefix.format("output"), inner)


def _shared(weights: Weights, token: Tensor, options: Any) -> Tensor:
    if not options.experts.shared.ffn_size:
        return torch.zeros_like(token)
    out = _expert(weights, "shared.mlp.{}", token, options)
    return torch.sigmoid(weights["shared.gate.weight"][0] @ token) * out if options.experts.shared.gate else out
