"""The network that every side trains, what a step takes in, and what a side is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from benchmarks.support.shape import Shape

#: Whole tensors by canonical name.
Weights = Mapping[str, Tensor]
#: The microbatches of a step: tokens and labels of each, both [b, s].
Batch = Sequence[tuple[Tensor, Tensor]]
#: fp32; or bf16, which is 16-bit weights with fp32 masters on our side and autocast on the others'.
Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")

SMALL = Shape(layers=6, hidden=384, heads=6, sequence=256, vocab=8192, micro_batch=4, microbatches=2)
TINY = Shape(layers=2, hidden=64, heads=2, sequence=16, vocab=256, micro_batch=2, microbatches=2)
SHAPES = {"small": SMALL, "tiny": TINY}

#: What every side updates with: AdamW in one kernel, betas and eps as PyTorch's, no decay of vectors.
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 3e-4, 0.01, 1.0


class Side(ABC):
    """One way to train the network."""

    @abstractmethod
    def step(self, batch: Batch) -> float:
        """Forward and backward of every microbatch, clipping and update; the mean loss of ``batch``."""

    def close(self) -> None:  # noqa: B027  # most sides have nothing to close
        """Leave nothing behind."""
