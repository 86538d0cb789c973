"""The network that all sides compute, the tokens of a step, and what a side is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.support.shape import SMALL, TINY, Shape

Weights = Mapping[str, Tensor]


SHAPES = {"small": SMALL, "tiny": TINY}


class Batch:
    """Random tokens and labels of a step; every loss is divided by their number, so that the step's loss is a mean."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(1)
        size = (shape.microbatches, shape.micro_batch, shape.sequence)
        self._tokens, self._labels = (torch.randint(shape.vocab, size, generator=generator) for _ in range(2))
        self.scale = torch.tensor(1.0 / self._tokens.numel())

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and labels of each microbatch, both [b, s]."""
        return zip(self._tokens, self._labels, strict=True)


class Side(Protocol):
    """One way to compute the losses and gradients of a batch, on all ranks or on the first alone."""

    #: What every rank must do; a side on one rank keeps only the first busy.
    ranks: int

    def clear(self) -> None:
        """Forget losses and gradients: no part of the time of a step."""

    def step(self) -> None:
        """Forward and backward of every microbatch."""

    def results(self) -> Mapping[str, Tensor]:
        """The losses and the whole gradient of every tensor by canonical name, after a step. Collective."""


def gathered(local: Any) -> list[Any]:
    """The tensors of every rank, by rank."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, local)
    return everyone
