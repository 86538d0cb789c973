"""PyTorch's update rule on DeepSpeed's groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_run_engine.optim.update_rules import find_rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from megatron_run_optimizer_deepspeed.options import Options
    from megatron_run_optimizer_deepspeed.partitions import FlatGroup


def make_rule(
    groups: Sequence[FlatGroup], tensors: Iterable[Sequence[Tensor]], options: Options, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of ``tensors``, one sequence for each of ``groups``."""
    made = [{"params": each, "megatron_run": group} for group, each in zip(groups, tensors, strict=True)]
    return find_rule(options.update).make(made, device)


def set_rates(rule: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    """Set each group's learning rate and weight decay for this step."""
    for each in rule.param_groups:
        group: FlatGroup = each["megatron_run"]
        each["lr"], each["weight_decay"] = lr * group.lr_mult, weight_decay if group.decays else 0.0


def begin(rule: torch.optim.Optimizer) -> None:
    """Create the state that the first step will find: all zeros, with which the rules of this plugin begin.

    PyTorch creates state in a step, so this takes one with zero gradients and rates, which moves nothing.
    """
    tensors = [tensor for group in rule.param_groups for tensor in group["params"]]
    if all(tensor in rule.state for tensor in tensors):
        return
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    set_rates(rule, 0.0, 0.0)
    rule.step()
    rule.zero_grad()
    for state in _state_tensors(rule):
        state.zero_()


def state_bytes(groups: Sequence[FlatGroup], partitions: Sequence[Tensor], options: Options) -> int:
    """Bytes of the state for ``partitions``, meta tensors, one for each of ``groups``."""
    if not groups:
        return 0
    planned = make_rule(groups, [[each] for each in partitions], options, torch.device("meta"))
    begin(planned)
    return sum(tensor.nbytes for tensor in _state_tensors(planned))


def _state_tensors(rule: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in rule.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
