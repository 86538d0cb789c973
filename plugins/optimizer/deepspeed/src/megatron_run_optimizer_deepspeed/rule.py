"""The options, and the update rule that they choose: PyTorch's, on DeepSpeed's groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from megatron_run.contracts.meaning import FIXED, NOT_LEARNED
from megatron_run_engine.optim import Decay, Multiplier, UpdateOptions, find_rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from megatron_run_optimizer_deepspeed.partitions import FlatGroup


def _why_not_three(stage: object) -> object:
    if stage in (3, "3"):
        raise ValueError(
            "ZeRO stage 3 cannot run here, since its hooks on modules fetch the parameters and free them, and here "
            "parameters stay where segments read them; set optimizer.stage to 1 or 2"
        )
    return stage


class Options(BaseModel):
    """Stage of ZeRO, update rule, and bucketing."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    stage: Annotated[Literal[1, 2], BeforeValidator(_why_not_three)] = Field(
        1, description="ZeRO stage; 2 also drops reduced gradients that other ranks use, as DeepSpeed does"
    )
    rule: Annotated[Literal["adamw", "adam", "sgd"], FIXED] = Field("adamw", description="PyTorch's, fused")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay of the moments, for adamw and adam")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment, for adamw and adam")
    momentum: float | None = Field(None, ge=0, lt=1, description="for sgd; unset: 0")
    nesterov: bool = Field(False, description="Nesterov momentum, for sgd")
    lr_mult: tuple[Multiplier, ...] = Field(
        (),
        description="PATTERN:FACTOR on the learning rate, by name; the last match counts",
    )
    reduce_bucket_size: Annotated[int, NOT_LEARNED] = Field(2**24, ge=1, description="gradient values reduced together")
    use_multi_rank_bucket_allreduce: Annotated[bool, NOT_LEARNED] = Field(
        True, description="reduce a bucket to all ranks at once; false: to each rank its part"
    )

    @property
    def update(self) -> UpdateOptions:
        """The update options that all optimizers have."""
        return UpdateOptions(**self.model_dump(include=set(UpdateOptions.model_fields), exclude_unset=True))


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
