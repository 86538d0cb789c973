"""Chunks small enough to check by hand: position k computes ``tanh(x @ A_k + m)``, the last one a loss.

`A_k` takes the split backward, a bias vector takes the hook, so both ways of a gradient are exercised. A model that
thins passes on fewer rows from position to position, in most microbatches: how many, only the sender knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import Boundary, ChunkOut, Init, Microbatch, ParameterSpec, Segment
from megatron_run_engine.nn.linear import linear
from megatron_run_engine.runtime.gradients import GradientAccumulator

WIDTH = 3
BOUNDARY = Boundary((2, WIDTH), torch.float64)


def weight(position: int) -> Tensor:
    """`A_k` [3, 3] of position k."""
    return torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(position))


def first_input(microbatch: int, rows: int = 2) -> Tensor:
    """What enters position 0: [rows, 3], different for each microbatch."""
    return torch.arange(rows * WIDTH, dtype=torch.float64).reshape(rows, WIDTH) / 10 + microbatch


def thins(microbatch: int) -> bool:
    """Whether a model that thins drops rows of this microbatch: of the others, all stages know the shape."""
    return microbatch % 3 != 1


def rows_left(microbatch: int, position: int) -> int:
    """How many rows position ``position`` of a model that thins passes on, down to none; before position 0: of -1."""
    return max(0, 8 - position - 2 * microbatch) if thins(microbatch) else 2


def thinning_boundary(microbatch: Microbatch) -> Boundary:
    """What a model that thins declares."""
    return Boundary((None, WIDTH), torch.float64) if thins(microbatch.index) else BOUNDARY


class ToyChunk(nn.Module):
    """One position of the toy model."""

    def __init__(self, position: int, last: bool, gradients: GradientAccumulator, *, thinning: bool = False) -> None:
        super().__init__()
        self.position, self.last, self.gradients, self.thinning = position, last, gradients, thinning
        self.weight = nn.Parameter(weight(position))
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.parameter_specs = {"weight": ParameterSpec(Init("zeros"))}

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        if x is None:
            x = first_input(microbatch.index, rows_left(microbatch.index, -1) if self.thinning else 2)
        y = torch.tanh(linear(x, self.weight, None, self.gradients) + self.shift + microbatch.index / 7)
        y = y[: rows_left(microbatch.index, self.position)] if self.thinning else y
        if not self.last:
            return ChunkOut(y)
        return ChunkOut(None, {"lm": (y.square().sum(), torch.tensor(1.0))})

    def segments(self) -> Sequence[Segment]:
        return ()


def by_autograd(
    positions: int, microbatches: int, *, thinning: bool = False
) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses by microbatch, and the summed gradients of `A_k` and of the shifts, by plain autograd."""
    weights = [weight(k).requires_grad_() for k in range(positions)]
    shifts = [torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(positions)]
    losses = []
    for microbatch in range(microbatches):
        x = first_input(microbatch, rows_left(microbatch, -1) if thinning else 2)
        for position, (matrix, shift) in enumerate(zip(weights, shifts, strict=True)):
            x = torch.tanh(x @ matrix.t() + shift + microbatch / 7)
            x = x[: rows_left(microbatch, position)] if thinning else x
        loss = x.square().sum()
        loss.backward()
        losses.append(loss.item())
    gradients: list[Any] = [tensor.grad for tensor in (*weights, *shifts)]
    return losses, gradients[:positions], gradients[positions:]
