"""Grouped matrix product: one matrix per group of rows, in one kernel where the device has one.

A schedule may split its backward in two, as that of :func:`megatron_run_engine.nn.linear.linear`.

The sizes of the groups are alike or known to the host (``row_groups``), or lie on the device, where the host never
reads them (``device_groups``).

Legend: g groups, n rows of all groups together, i inputs, o outputs.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run_engine.nn.device_groups import DeviceGroups
from megatron_run_engine.nn.row_groups import EqualGroups, RowGroups
from megatron_run_engine.runtime.gradients import main_grad

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run_engine.runtime.gradients import GradientAccumulator

    Groups = EqualGroups | RowGroups | DeviceGroups


class GroupedLayer(nn.Module):
    """Base of layers with one matrix for each group of rows, such as those of experts.

    One that ``takes_device_counts`` never reads the counts on the host, where they lie on the device.
    """

    takes_device_counts: bool = False


def grouped_linear(
    rows: Tensor,
    weight: Parameter,
    bias: Parameter | None,
    counts: Tensor | int,
    gradients: GradientAccumulator,
    bias_share: float = 1.0,
) -> Tensor:
    """``rows @ weight[g].T + bias_share * bias[g]`` for the rows of each group g: [n, i] -> [n, o].

    ``weight`` [g*o, i] and ``bias`` [g*o] are the groups' matrices stacked. ``counts`` [g], integers on the CPU or,
    where :func:`~megatron_run_engine.nn.device_groups.takes_counts` says so, on the device of the rows, holds the
    number of rows per group, and an int is that of every group; rows are sorted by group. Weight gradients go to
    ``gradients``, also when there are no rows: every gradient must arrive, or its bucket would never be complete.
    """
    result: Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]  # torch's
        rows, weight, bias, counts, gradients, bias_share
    )
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        counts: Tensor | int,
        gradients: GradientAccumulator,
        bias_share: float,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        # The parameters themselves, which have main_grad: saved tensors may come back as copies (see linear.py).
        ctx.weight, ctx.bias, ctx.gradients = weight, bias, gradients
        ctx.groups = groups = _groups_of(rows, counts)
        ctx.bias_share = bias_share
        y = groups.multiply(rows, groups.stacked(weight).transpose(1, 2))
        if bias is not None:
            groups.add_biases(y, groups.stacked(bias), bias_share)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (rows,), (grad,), groups = ctx.saved_tensors, grads, ctx.groups
        if ctx.weight.requires_grad:
            _submit(ctx.gradients, ctx.weight, ctx.bias, rows, grad, groups, ctx.bias_share)
        product = groups.multiply(grad, groups.stacked(ctx.weight)) if ctx.needs_input_grad[0] else None
        return product, None, None, None, None, None


def _groups_of(rows: Tensor, counts: Tensor | int) -> Groups:
    """The groups of ``rows``. On a CPU the counts always lie on the device of the rows."""
    if isinstance(counts, int):
        return EqualGroups(counts, len(rows))
    if counts.device == rows.device:
        return DeviceGroups(counts, len(rows))
    return RowGroups(list(accumulate(counts.tolist())), rows.device)


def _submit(
    gradients: GradientAccumulator,
    weight: Parameter,
    bias: Parameter | None,
    rows: Tensor,
    grad: Tensor,
    groups: Groups,
    bias_share: float,
) -> None:
    def compute() -> None:
        groups.add_products(groups.stacked(main_grad(weight)), grad, rows)
        if bias is not None:
            groups.add_sums(groups.stacked(main_grad(bias)), grad, bias_share)

    gradients.submit((weight,) if bias is None else (weight, bias), compute)
