"""PyTorch's update rule on DeepSpeed's groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_run.optim.rules import find_rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from megatron_run_optimizer_deepspeed.options import Options
    from megatron_run_optimizer_deepspeed.partitions import FlatGroup


def make_rule(
    groups: Sequence[FlatGroup], tensors: Iterable[Sequence[Tensor]], options: Options, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of ``tensors``, as many sequences of them as there are ``groups``."""
    made = [{"params": each, "megatron_run": group} for group, each in zip(groups, tensors, strict=True)]
    return find_rule(options.update).make(made, device)


def set_rates(rule: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    """The numbers of this step, for each group its own."""
    for each in rule.param_groups:
        group: FlatGroup = each["megatron_run"]
        each["lr"], each["weight_decay"] = lr * group.lr_mult, weight_decay if group.decays else 0.0


def make_state(rule: torch.optim.Optimizer) -> None:
    """Let the rule make the state that it begins with, by a step that moves nothing and does not count."""
    tensors = [tensor for group in rule.param_groups for tensor in group["params"]]
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    set_rates(rule, 0.0, 0.0)
    rule.step()
    rule.zero_grad()
    for state in rule.state.values():
        if "step" in state:
            state["step"] *= 0


def state_tensors(rule: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor of the rule's state."""
    for state in rule.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
