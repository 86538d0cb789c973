"""Chunks small enough to check by hand: position k computes ``tanh(x @ A_k + m)``, the last one a loss.

`A_k` takes the split backward, a bias vector takes the hook, so both ways of a gradient are exercised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import Boundary, ChunkOut, Init, Microbatch, ParameterSpec, Segment
from megatron_run.gradients import Gradients
from megatron_run.nn.linear import linear

WIDTH = 3
BOUNDARY = Boundary((2, WIDTH), torch.float64)


def weight(position: int) -> Tensor:
    """`A_k` [3, 3] of position k."""
    return torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(position))


def first_input(microbatch: int) -> Tensor:
    """What enters position 0: [2, 3], different for each microbatch."""
    return torch.arange(6, dtype=torch.float64).reshape(2, WIDTH) / 10 + microbatch


class ToyChunk(nn.Module):
    """One position of the toy model."""

    def __init__(self, position: int, last: bool, gradients: Gradients) -> None:
        super().__init__()
        self.position, self.last, self.gradients = position, last, gradients
        self.weight = nn.Parameter(weight(position))
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.parameter_specs = {"weight": ParameterSpec(Init("zeros"))}

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        x = first_input(microbatch.index) if x is None else x
        y = torch.tanh(linear(x, self.weight, None, self.gradients) + self.shift + microbatch.index / 7)
        if not self.last:
            return ChunkOut(y)
        return ChunkOut(None, {"lm": (y.square().sum(), torch.tensor(1.0))})

    def segments(self) -> Sequence[Segment]:
        return ()


def by_autograd(positions: int, microbatches: int) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses by microbatch, and the summed gradients of `A_k` and of the shifts, by plain autograd."""
    weights = [weight(k).requires_grad_() for k in range(positions)]
    shifts = [torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(positions)]
    losses = []
    for microbatch in range(microbatches):
        x = first_input(microbatch)
        for matrix, shift in zip(weights, shifts, strict=True):
            x = torch.tanh(x @ matrix.t() + shift + microbatch / 7)
        loss = x.square().sum()
        loss.backward()
        losses.append(loss.item())
    gradients: list[Any] = [tensor.grad for tensor in (*weights, *shifts)]
    return losses, gradients[:positions], gradients[positions:]
