"""As many products of the same sizes without choosing anything: what no layer of experts can undercut."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.moe.model import Precision, Problem, Shape

NAME = "dense layer of equal FLOPs"


class DenseLayer:
    """One expert's network, for every token as often as it has experts."""

    def __init__(self, shape: Shape, precision: Precision) -> None:
        problem = Problem.of(shape, precision)
        self._x = problem.x.repeat(shape.top_k, 1).requires_grad_()  # [n*k, h]
        self._grad = problem.grad.repeat(shape.top_k, 1)
        self._entry, self._exit = nn.Parameter(problem.entry[0].clone()), nn.Parameter(problem.exit[0].clone())

    def clear(self) -> None:
        """Forget gradients."""
        for tensor in (self._x, self._entry, self._exit):
            tensor.grad = None

    def step(self) -> None:
        """Forward and backward."""
        gate, up = F.linear(self._x, self._entry).chunk(2, dim=-1)
        self._y = F.linear(F.silu(gate) * up, self._exit)
        self._y.backward(self._grad)

    def results(self) -> Mapping[str, Tensor]:
        """Output and gradients, which are another layer's."""
        found = {"y": self._y.detach(), "x": self._x.grad, "entry": self._entry.grad, "exit": self._exit.grad}
        assert all(each is not None for each in found.values())
        return {name: torch.as_tensor(each).float() for name, each in found.items()}
