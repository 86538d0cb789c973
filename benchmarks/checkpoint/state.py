"""The state that every side saves: the boxes of weights and moments that a rank of a training with ``zero1`` holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.optimizer import ours
from benchmarks.optimizer.model import SHAPES, Batch
from megatron_run_engine.checkpoint.boxes import Box
from megatron_run_engine.checkpoint.shard_file import tensor_name


class State:
    """This rank's boxes, each with memory of its own and random values, for a model of ``shape``. Collective."""

    def __init__(self, shape: str) -> None:
        side = ours.sharded(ours.Ranks(), SHAPES[shape], Batch(SHAPES[shape]))
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.pieces = [
            piece._replace(tensor=torch.randn(piece.tensor.shape, generator=generator)) for piece in side.pieces()
        ]
        self.shapes = side.shapes
        self._kept = {name: tensor.clone() for name, tensor in self.tensors.items()}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By names that are those of no other rank's."""
        return {tensor_name(each.name, each.field, Box(each.starts, each.sizes)): each.tensor for each in self.pieces}

    @property
    def bytes(self) -> int:
        """Of this rank."""
        return sum(piece.tensor.nbytes for piece in self.pieces)

    def forget(self) -> None:
        """Fill with what no side saved."""
        for piece in self.pieces:
            piece.tensor.fill_(torch.nan)

    def check(self) -> None:
        """Raise :class:`ValueError` unless every value is what it was at first."""
        for name, tensor in self.tensors.items():
            if not torch.equal(tensor, self._kept[name]):
                raise ValueError(f"{name} is not what was saved")


class Side(Protocol):
    """One way to save a state and to load it again, in place."""

    def save(self, number: int) -> None:
        """Save under this number; returns when it is on the disk, on every rank. Collective."""

    def load(self, number: int) -> None:
        """Load what was saved under this number into the same tensors. Collective."""

    def drop(self, number: int) -> None:
        """Remove it. Collective."""
