"""Chunks small enough to check by hand: position k computes ``tanh(x @ A_k + m)``, the last one a loss.

`A_k` takes the split backward, a bias vector takes the hook, so both ways of a gradient are exercised. A model that
thins passes on fewer rows from position to position, in most microbatches: how many, only the sender knows. One that is
paired sends a second tensor of another length, which each even position maps on and two of three positions add to x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import Boundary, ChunkOut, Init, Microbatch, ParameterSpec, Segment
from megatron_run_engine.nn.linear import linear
from megatron_run_engine.runtime.gradients import GradientAccumulator

WIDTH = 3
#: Rows of the second tensor of a paired model.
SIDE = 5


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


def toy_boundary(microbatch: Microbatch, *, thinning: bool, paired: bool) -> Boundary:
    """What the model declares. Of one that thins, the second tensor's length is always secret."""
    secret = thinning and thins(microbatch.index)
    beside = {"side": Boundary((None if thinning else SIDE, WIDTH), torch.float64)} if paired else {}
    return Boundary((None if secret else 2, WIDTH), torch.float64, beside)


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
            x = self.first(microbatch)
        y = torch.tanh(linear(x, self.weight, None, self.gradients) + self.shift + microbatch.index / 7)
        y = y[: rows_left(microbatch.index, self.position)] if self.thinning else y
        if not self.last:
            return ChunkOut(y)
        return ChunkOut(None, {"lm": (y.square().sum(), torch.tensor(1.0))})

    def first(self, microbatch: Microbatch) -> Tensor:
        return first_input(microbatch.index, rows_left(microbatch.index, -1) if self.thinning else 2)

    def segments(self) -> Sequence[Segment]:
        return ()


class PairedChunk(ToyChunk):
    """One position of a paired model."""

    def forward(self, x: Tensor | None, microbatch: Microbatch, *, side: Tensor | None = None) -> ChunkOut:
        if x is None or side is None:
            x, side = self.first(microbatch), first_input(microbatch.index, SIDE)
        if self.position % 2 == 0:
            side = torch.tanh(linear(side, self.weight, None, self.gradients))
        out = super().forward(x if self.position % 3 == 2 else x + side.mean(0), microbatch)
        return out if out.x is None else replace(out, beside={"side": side})


def by_autograd(
    positions: int, microbatches: int, *, thinning: bool = False, paired: bool = False
) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses by microbatch, and the summed gradients of `A_k` and of the shifts, by plain autograd."""
    weights = [weight(k).requires_grad_() for k in range(positions)]
    shifts = [torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(positions)]
    losses = []
    for microbatch in range(microbatches):
        x = first_input(microbatch, rows_left(microbatch, -1) if thinning else 2)
        side = first_input(microbatch, SIDE)
        for position, (matrix, shift) in enumerate(zip(weights, shifts, strict=True)):
            side = torch.tanh(side @ matrix.t()) if position % 2 == 0 else side
            x = x + side.mean(0) if paired and position % 3 != 2 else x
            x = torch.tanh(x @ matrix.t() + shift + microbatch / 7)
            x = x[: rows_left(microbatch, position)] if thinning else x
        loss = x.square().sum()
        loss.backward()
        losses.append(loss.item())
    gradients: list[Any] = [tensor.grad for tensor in (*weights, *shifts)]
    return losses, gradients[:positions], gradients[positions:]
