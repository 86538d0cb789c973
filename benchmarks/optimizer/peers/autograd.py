"""The model's chunk for optimizers that read ``parameter.grad``: what autograd would leave there, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from benchmarks.optimizer.model import BETAS, EPS, LR, WEIGHT_DECAY, MeanLoss, build
from benchmarks.optimizer.ours import Ranks
from benchmarks.support.shape import Shape
from megatron_run.contracts import ParamInfo
from megatron_run_engine.runtime.gradients import GradientAccumulator

Infos = Mapping[Parameter, ParamInfo]


class _First:
    """Stands in for the ``main_grad`` of a parameter without gradient: the first product becomes its gradient."""

    def __init__(self, parameter: Parameter) -> None:
        self._parameter, self.dtype = parameter, parameter.dtype

    def add_(self, gradient: Tensor) -> None:
        self._parameter.grad = gradient.contiguous()

    def addmm_(self, left: Tensor, right: Tensor) -> None:
        self._parameter.grad = left @ right

    def index_add_(self, dim: int, index: Tensor, source: Tensor) -> None:
        self._parameter.grad = torch.zeros_like(self._parameter).index_add_(dim, index, source)


class IntoGrad(GradientAccumulator):
    """Layers hand their weight gradients over to this: they go to ``parameter.grad``, as autograd's own do."""

    def submit(self, parameters: Sequence[Parameter], compute: Callable[[], None], *, reads: bool = False) -> None:
        """Compute at once, into the gradient that is there or a new one."""
        for parameter in parameters:
            vars(parameter)["main_grad"] = _First(parameter) if parameter.grad is None else parameter.grad
        with torch.no_grad():
            compute()


def plain_model(ranks: Ranks, shape: Shape) -> tuple[MeanLoss, dict[Parameter, ParamInfo]]:
    """The model, whose backward leaves every gradient in ``parameter.grad``."""
    return build(replace(ranks.context(shape), gradients=IntoGrad()), shape)


def groups(parameters: Iterable[tuple[Parameter, ParamInfo]]) -> list[dict[str, Any]]:
    """The parameters in groups as torch's optimizers want them: with weight decay and without."""
    members: dict[bool, list[Parameter]] = {True: [], False: []}
    for parameter, info in parameters:
        members[info.decay].append(parameter)
    return [{"params": found, "weight_decay": WEIGHT_DECAY if decays else 0.0} for decays, found in members.items()]


#: The arguments of torch's AdamW, its fastest implementation.
ADAMW: Mapping[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "fused": True}


def logical(tensors: Iterable[tuple[Tensor, ParamInfo]]) -> dict[str, Tensor]:
    """Tensors in the shape of whole parameters, cut into logical tensors by name."""
    return {
        part.name: tensor[part.local.start : part.local.stop].clone() for tensor, info in tensors for part in info.parts
    }


def bytes_of(state: Mapping[Any, Mapping[str, Any]]) -> int:
    """Bytes of the tensors of an optimizer's ``state`` that this rank holds."""
    values = (value for fields in state.values() for value in fields.values() if isinstance(value, Tensor))
    return sum(getattr(value, "_local_tensor", value).nbytes for value in values)


def by_name(model: nn.Module, infos: Infos) -> dict[str, ParamInfo]:
    """The knowledge of each parameter of ``model``, by its name there: that stays when parameters are replaced."""
    return {name: infos[parameter] for name, parameter in model.named_parameters()}
