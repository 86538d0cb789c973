"""The network that every optimizer trains, the tokens of a rank's step, the numbers of the update, what a side is.

All sides train the built-in model's own chunk: kernels, loss and initial weights are the same everywhere, and only
where gradients are kept, reduced and used differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support.gpt import gpt_options
from benchmarks.support.shape import SMALL, TINY, Shape
from megatron_run.contracts import Chunk, Microbatch, ParamInfo
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run_engine.builtin.model.gpt import Gpt
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.parameter_init import describe_parameters, initialise

#: What the update is made with, on every side.
LR, WEIGHT_DECAY, BETAS, EPS, CLIP = 1e-3, 0.1, (0.9, 0.95), 1e-8, 1.0


#: Little to compute for what is to be sent: one sequence through three times the parameters.
WIDE = Shape(layers=6, hidden=768, heads=12, sequence=256, vocab=8192, micro_batch=1, microbatches=1)
SHAPES = {"small": SMALL, "wide": WIDE, "tiny": TINY}


class Batch:
    """Random tokens and labels of one rank's step."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        size = (shape.microbatches, shape.micro_batch, shape.sequence)
        self._tokens, self._labels = (torch.randint(shape.vocab, size, generator=generator) for _ in range(2))
        self._mask = torch.ones(shape.micro_batch, shape.sequence)
        self.microbatches = shape.microbatches

    def __iter__(self) -> Iterator[Microbatch]:
        """Each microbatch, its fields [b, s]."""
        for index, (tokens, labels) in enumerate(zip(self._tokens, self._labels, strict=True)):
            fields = {"tokens": tokens, "labels": labels, "loss_mask": self._mask}
            yield Microbatch(index, 1, index * len(tokens), fields)


class MeanLoss(nn.Module):
    """The model's chunk as a module that returns its loss, the mean over a microbatch's tokens."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, microbatch: Microbatch) -> Tensor:
        """The loss, []."""
        total, weight = self.chunk(None, microbatch).losses["lm"]
        return total / weight


class Side(Protocol):
    """One way to train a replica on every rank."""

    def step(self) -> None:
        """Forward and backward of every microbatch, reduction, clipping, update. Leaves nothing on its way."""

    @property
    def losses(self) -> Tensor:
        """The losses of the last step on this rank, [microbatches]."""

    def first_moments(self) -> Mapping[str, Tensor]:
        """AdamW's first moment of every logical tensor, whole: after one step a tenth of the gradient. Collective."""

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""


def build(context: BuildContext, shape: Shape) -> tuple[MeanLoss, dict[nn.Parameter, ParamInfo]]:
    """The whole model in one chunk, initialised: the same values in each call and on each rank."""
    layout = looped_layout(LayoutSpec(1, 1, shape.layers))
    model = MeanLoss(Gpt(context, gpt_options(shape)).build_chunk(0, layout, DenseLayers(context), {}))
    infos = describe_parameters(model.chunk)
    initialise(infos, context.train.seed)
    return model, infos


def gathered(local: Any) -> list[Any]:
    """The tensors of every rank, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    return everyone
