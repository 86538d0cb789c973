"""Gradients beside finite differences of the loss.

Cuts, ranks and recomputation share a gradient that is wrong, and agree on it. The slope of the loss itself, measured
from its values in float64, knows nothing of how a model computes its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing import CheckFailed

#: How far the parameters go: where float64 is exact to some 1e-9, and farther for a loss with parts in float32.
_STEPS = (1e-6, 1e-5, 1e-4)
#: A slope is measured over the whole step and over these shares of it, which agree where the loss is smooth.
_SHARES = (1.0, 0.7, 0.4)
#: How far these may be apart, and how far a slope may be from the gradient's, as shares of the gradient's norm.
_ROUGH, _CLOSE = 1e-3, 1e-5
#: Standard deviation of what is added to initial values, of which many are 0: there a ReLU has a kink, a product no
#: gradient.
_AWAY = 0.02
#: Directions that must all disagree: a router that chooses otherwise just there is no fault.
_DIRECTIONS = 3

Direction = dict[Parameter, Tensor]


class _Slope(NamedTuple):
    """A measured slope, and how far it may be off."""

    value: float
    error: float


def check_slopes(loss: Callable[[], Tensor], names: Mapping[Parameter, str]) -> str:
    """Compare the gradients of ``loss`` with its slope along random directions of the parameters, which ``names`` name.

    Raises :class:`CheckFailed` with the tensor whose gradient is wrong. Returns why nothing could be compared, or "".
    A parameter that needs no gradient keeps its value.
    """
    generator = torch.Generator().manual_seed(1)
    trained = [parameter for parameter in names if parameter.requires_grad]
    with torch.no_grad():
        for parameter, away in _direction(trained, generator).items():
            parameter.add_(away, alpha=_AWAY)
    torch.autograd.backward(loss())
    gradients = {parameter: main_grad(parameter).clone() for parameter in trained}
    norm = max(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt().item(), 1e-12)
    wrong = None
    for _ in range(_DIRECTIONS):
        direction = _direction(trained, generator)
        slope = _measured(loss, direction, norm)
        if slope is not None and _agree(slope, gradients, direction, norm):
            return ""
        wrong = direction if slope is not None else wrong
    if wrong is None:
        return "its loss is too rough for finite differences, as where much of it is computed in half precision"
    raise CheckFailed(_blame(loss, names, gradients, wrong, norm))


def _blame(
    loss: Callable[[], Tensor],
    names: Mapping[Parameter, str],
    gradients: Direction,
    direction: Direction,
    norm: float,
) -> str:
    """The fault, with the last tensor along which alone the loss does not change as its gradient says.

    A gradient that is lost is lost for all that comes before: the last tensor is the nearest to the fault.
    """
    for parameter, along in reversed(direction.items()):
        alone = {parameter: along}
        slope = _measured(loss, alone, norm)
        if slope is not None and not _agree(slope, gradients, alone, norm):
            found = f"the loss changes by {slope.value:.4g}, and by its gradient {_dot(gradients, alone):.4g}"
            return f"along {names[parameter]} {found}: is a tensor detached, or changed in place?"
    return "the loss does not change as its gradients say"


def _direction(parameters: Iterable[Parameter], generator: torch.Generator) -> Direction:
    """A normal random direction."""
    return {
        parameter: torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(parameter.device)
        for parameter in parameters
    }


def _measured(loss: Callable[[], Tensor], direction: Direction, norm: float) -> _Slope | None:
    """The slope of ``loss`` along ``direction``, by central differences.

    None where it depends on the step, and where the loss stands still, as one does that was rounded.
    """
    for step in _STEPS:
        slopes = [_difference(loss, direction, step * share) for share in _SHARES]
        error = max(slopes) - min(slopes)
        if any(slopes) and error <= _ROUGH * norm:
            return _Slope(slopes[0], error)
    return None


@torch.no_grad()
def _difference(loss: Callable[[], Tensor], direction: Direction, step: float) -> float:
    before = {parameter: parameter.clone() for parameter in direction}
    ends = []
    for signed in (step, -step):
        for parameter, along in direction.items():
            parameter.copy_(before[parameter]).add_(along, alpha=signed)
        ends.append(loss().item())
    for parameter, value in before.items():
        parameter.copy_(value)
    return float(ends[0] - ends[1]) / (2 * step)


def _agree(slope: _Slope, gradients: Direction, direction: Direction, norm: float) -> bool:
    return abs(slope.value - _dot(gradients, direction)) <= _CLOSE * norm + 4 * slope.error


def _dot(gradients: Direction, direction: Direction) -> float:
    return float(sum((gradients[parameter] * along).sum().item() for parameter, along in direction.items()))
