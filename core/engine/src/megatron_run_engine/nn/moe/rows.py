"""Copies of tokens sorted by expert, and their way back: gathers in both directions, so that nothing is added twice.

A copy's gradient is found by the inverse map, never scattered, which is faster and the same in every run. Only rows
whose tokens are those of other ranks are added up.

Legend: n tokens, h hidden, k experts of a token, m copies that are kept, the first of n*k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def copy_rows(tokens: Tensor, order: Tensor, place: Tensor, kept: int) -> Tensor:
    """The first ``kept`` of the assignments ``order`` [n*k] as rows: tokens [n, h] -> [m, h]; ``place`` inverts it."""
    rows: Tensor = _Copy.apply(tokens, order, place, kept)  # type: ignore[no-untyped-call]  # torch's
    return rows


def pad_rows(rows: Tensor, total: int) -> Tensor:
    """Zeros for what was dropped: [m, h] -> [n*k, h], a shape that does not depend on the routing."""
    return rows if len(rows) == total else F.pad(rows, (0, 0, 0, total - len(rows)))


def combine_rows(rows: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Each token's weighted sum of its rows: [n*k, h] in the ``order`` of experts, weights [n, k] -> [n, h]."""
    sums: Tensor = _Combine.apply(rows, weights, order, place)  # type: ignore[no-untyped-call]  # torch's
    return sums


def add_rows(rows: Tensor, weights: Tensor, origin: Tensor, tokens: int) -> Tensor:
    """Each token's weighted sum of the rows that are here: [m, h], weights [m], their tokens ``origin`` [m] -> [n, h].

    The terms of a token are added in fp32, in the order of the rows, and the sum is rounded once, as in
    :func:`combine_rows`; on CUDA the order varies unless kernels are deterministic.
    """
    sums: Tensor = _Add.apply(rows, weights, origin, tokens)  # type: ignore[no-untyped-call]  # torch's
    return sums


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, kept: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, order[:kept] // (len(order) // len(tokens)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place,), (grad,) = ctx.saved_tensors, grads
        copies = pad_rows(grad, len(place)).index_select(0, place)  # [n*k, h] by token
        return copies.view(ctx.tokens, -1, copies.shape[1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, place)
        return torch.bmm(weights.to(rows.dtype)[:, None], _by_token(rows, place, weights))[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (rows, weights, order, place), (grad,) = ctx.saved_tensors, grads
        of_weights = torch.bmm(_by_token(rows, place, weights), grad[:, :, None])[:, :, 0]  # [n, k]
        of_rows = grad.index_select(0, order // weights.shape[1])
        of_rows *= weights.flatten()[order].to(rows.dtype)[:, None]
        return of_rows, of_weights.to(weights.dtype), None, None


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
        of_sums = grad.index_select(0, origin)
        of_weights = torch.bmm(rows[:, None], of_sums[:, :, None])[:, 0, 0]
        of_sums *= weights.to(rows.dtype)[:, None]
        return of_sums, of_weights.to(weights.dtype), None, None


def _by_token(rows: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """[n*k, h] -> [n, k, h]."""
    return rows.index_select(0, place).view(*weights.shape, -1)
