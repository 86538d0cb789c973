"""This project's layers: whole on one rank, or split by the plugin ``parallel-layer=tensor``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.gpt import gpt_options, train_section
from benchmarks.support.shape import Shape
from benchmarks.tensor_parallel.model import Batch, gathered
from megatron_run.contracts import Microbatch, ParallelLayers
from megatron_run.contracts.data import LABELS, LOSS_MASK, TOKENS
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.optim.buckets import build_buckets
from megatron_run_engine.runtime.comm import Groups, create_groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.sample_cut import SampleCut
from megatron_run_parallel_layer_tensor import Options, megatron_run_create_parallel_layer
from megatron_run_testing.build_contexts import context_at, logical_values, prepare

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import ParamInfo


class Ranks:
    """Where this rank is in a grid of ``sizes``, by default all along ``tensor``, and its groups. Collective."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.topology = Topology(sizes or Sizes(tensor=dist.get_world_size()), dist.get_rank())
        self.groups = create_groups(self.topology, dist.default_pg_timeout)


class OurStep:
    """A step of the built-in model with the ``layers`` of one factory."""

    def __init__(self, shape: Shape, batch: Batch, context: BuildContext, layers: ParallelLayers) -> None:
        assert isinstance(context.model, GptOptions)
        self.ranks = context.topology.sizes.world
        self._context, self._batch, self._losses = context, batch, list[Tensor]()
        self._mask = torch.ones(shape.micro_batch, shape.sequence)
        layout = looped_layout(LayoutSpec(1, 1, shape.layers))
        self._chunk = Gpt(context, context.model).build_chunk(0, layout, layers, {})
        self._infos = prepare(context, [self._chunk])
        self._cut = SampleCut.of(context.pieces, (TOKENS, LABELS, LOSS_MASK))
        #: Made again, to have them at hand: those whose gradient is a sum over the ranks.
        buckets = build_buckets([self._infos], 1)
        self._partial = [bucket for bucket in buckets if any(info.partial_over for info in bucket.infos.values())]
        self._replicated = buckets if context.pieces.ranks > 1 else []

    @property
    def weights(self) -> dict[str, Tensor]:
        """The values of this rank by canonical name; whole where the layers are."""
        return logical_values(self._infos)

    def clear(self) -> None:
        """Forget losses and gradients."""
        for parameter in self._infos:
            main_grad(parameter).zero_()
        self._losses.clear()
        self._context.gradients.start_step(self._microbatches, lambda _: None)

    def step(self) -> None:
        """Forward and backward of every microbatch, and the sum of the gradients that each rank has a part of."""
        self.passes()
        for bucket in self._partial:
            self._context.groups.sum_(bucket.grad, "tensor")
        for bucket in self._replicated:
            self._context.groups.sum_(bucket.grad, "replicas")

    def passes(self) -> None:
        """Forward and backward of every microbatch."""
        for index, (tokens, labels) in enumerate(self._batch):
            total = self.forward(index, tokens, labels)
            total.backward(self._batch.scale)
            self._losses.append(total.detach() * self._batch.scale)

    def forward(self, index: int, tokens: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of microbatch ``index``, of the tokens [b, s] that this rank holds."""
        whole = {"tokens": tokens, "labels": labels, "loss_mask": self._mask}
        fields = {name: self._cut(name, rows) for name, rows in whole.items()}
        return self._chunk(None, Microbatch(index, 1, index * len(tokens), fields)).losses["lm"][0]

    def results(self) -> dict[str, Tensor]:
        """The losses, and the gradients put together from the parts of all ranks."""
        pieces = list(_pieces(self._infos, map(main_grad, self._infos)))
        shared = gathered(pieces) if self.ranks > 1 else [pieces]
        losses = self._context.groups.sum_(torch.stack(self._losses), "context")
        return _assembled(piece for rank in shared for piece in rank) | {"losses": losses}

    @property
    def _microbatches(self) -> int:
        return sum(1 for _ in self._batch)


#: A part of a logical tensor: name and shape of the whole, its first row and column, the values.
_Piece = tuple[str, tuple[int, ...], int, int, Tensor]


def _pieces(infos: Mapping[Parameter, ParamInfo], tensors: Iterable[Tensor]) -> Iterable[_Piece]:
    for info, tensor in zip(infos.values(), tensors, strict=True):
        for part in info.parts:
            yield part.name, part.shape, part.start, part.column, tensor[part.local.start : part.local.stop].clone()


def _assembled(pieces: Iterable[_Piece]) -> dict[str, Tensor]:
    """The logical tensors; what no piece fills is not a number, so that no comparison passes it."""
    wholes: dict[str, Tensor] = {}
    for name, shape, row, column, values in pieces:
        whole = wholes.setdefault(name, values.new_full(shape, torch.nan))
        rows = whole[row : row + len(values)]
        (rows if whole.ndim == 1 else rows[:, column : column + values.shape[1]]).copy_(values)
    return wholes


def dense(shape: Shape, batch: Batch) -> OurStep:
    """Whole layers: what one rank does alone."""
    context = _context(shape, Topology(Sizes(), 0), Groups())
    return OurStep(shape, batch, context, DenseLayers(context))


def split(shape: Shape, batch: Batch, ranks: Ranks, *, sequence: bool = False, overlap: bool = True) -> OurStep:
    """Layers split over all ranks by the plugin, with sequence parallelism or without."""
    context = _context(shape, ranks.topology, ranks.groups, sequence=sequence)
    return OurStep(shape, batch, context, megatron_run_create_parallel_layer(context, Options(overlap=overlap)))


def _context(shape: Shape, topology: Topology, groups: Groups, *, sequence: bool = False) -> BuildContext:
    return context_at(
        topology, groups, gpt_options(shape), sequence=sequence, dtype=torch.float32, train=train_section(shape)
    )
