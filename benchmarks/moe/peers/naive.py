"""The layer as one writes it down: each expert picks its tokens, computes, and adds what it made."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.moe.model import Precision, Problem, Shape

NAME = "naive loop"


class NaiveLoop:
    """``index_select``, two products and ``index_add`` an expert.

    Fair: each expert has matrices of its own. A slice of stacked ones would make a gradient of all of them each time.
    """

    def __init__(self, shape: Shape, precision: Precision) -> None:
        problem = Problem.of(shape, precision)
        self._top_k, self._grad = shape.top_k, problem.grad
        self._x = problem.x.requires_grad_()
        self._router = nn.Parameter(problem.router)
        self._entries = [nn.Parameter(matrix.clone()) for matrix in problem.entry]
        self._exits = [nn.Parameter(matrix.clone()) for matrix in problem.exit]

    def clear(self) -> None:
        """Forget gradients."""
        for tensor in (self._x, self._router, *self._entries, *self._exits):
            tensor.grad = None

    def step(self) -> None:
        """Forward and backward."""
        self._y = self._forward(self._x)
        self._y.backward(self._grad)

    def _forward(self, x: Tensor) -> Tensor:
        best, chosen = F.linear(x.float(), self._router.float()).topk(self._top_k, dim=-1)
        weights = best.softmax(-1).to(x.dtype)
        out = torch.zeros_like(x)
        for expert, (entry, leave) in enumerate(zip(self._entries, self._exits, strict=True)):
            token, choice = torch.where(chosen == expert)
            gate, up = F.linear(x.index_select(0, token), entry).chunk(2, dim=-1)
            made = F.linear(F.silu(gate) * up, leave) * weights[token, choice, None]
            out.index_add_(0, token, made)
        return out

    def results(self) -> Mapping[str, Tensor]:
        """Output and gradients."""
        return {
            "y": self._y.detach().float(),
            "x": _gradients(self._x).view_as(self._x),
            "router": _gradients(self._router),
            "entry": _gradients(*self._entries),
            "exit": _gradients(*self._exits),
        }


def _gradients(*tensors: Tensor) -> Tensor:
    """One after the other, fp32 and flat."""
    found = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]
    return torch.cat([gradient.float().flatten() for gradient in found])
