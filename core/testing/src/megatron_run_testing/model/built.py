"""A model on one process, cut into chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_run.contracts import Chunk, ChunkOut, Microbatch, Model, ParallelLayers, ParamInfo
from megatron_run.contracts.data import as_fields
from megatron_run.contracts.schedule import LayoutSpec, Place, looped_layout
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.build_contexts import logical_gradients, prepare

#: Creates the model under test from a context and its options, as its factory hook does.
CreateModel = Callable[[BuildContext, BaseModel], Model]


@dataclass
class Built:
    """A model cut into chunks, in model order, on one process."""

    model: Model
    layout: tuple[Place, ...]
    chunks: tuple[Chunk, ...]
    infos: dict[Parameter, ParamInfo]

    def train(self, *, mode: bool) -> Built:
        """Switch dropout of all chunks on or off."""
        for chunk in self.chunks:
            chunk.train(mode)
        return self

    def forward(self, microbatch: Microbatch) -> tuple[ChunkOut, list[ChunkOut]]:
        """Run all chunks, each with its fields; return the output, and those that crossed between chunks.

        The output contains the losses of all chunks; a loss that several chunks report is summed.
        """
        out, crossed = ChunkOut(None), list[ChunkOut]()
        losses: dict[str, tuple[Tensor, Tensor]] = {}
        for position, chunk in enumerate(self.chunks):
            out = chunk(out.x, self.given(position, microbatch), **out.beside)
            if out.x is not None:
                crossed.append(out)
            for name, (total, weight) in out.losses.items():
                before, weights = losses.get(name, (0.0, 0.0))
                losses[name] = (before + total, weights + weight)
        return replace(out, losses=losses), crossed

    def given(self, position: int, microbatch: Microbatch) -> Microbatch:
        """``microbatch`` with the fields that ``position`` asks for."""
        wanted = self.asked(position)
        return replace(microbatch, fields={name: x for name, x in microbatch.fields.items() if name in wanted})

    def asked(self, position: int) -> set[str]:
        """The names of the fields that the model asks for at ``position``."""
        return {field.name for field in as_fields(self.model.fields(position, self.layout))}

    def step(self, microbatch: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        """One forward and backward: the summed loss, and the gradient of every logical tensor.

        The gradient of a tensor with copies on two stages is the sum of theirs.
        """
        total = torch.stack([loss for loss, _ in self.forward(microbatch)[0].losses.values()]).sum()
        torch.autograd.backward(total)
        sums: dict[str, Tensor] = {}
        for parameter, info in self.infos.items():
            for name, gradient in logical_gradients({parameter: info}).items():
                sums[name] = sums[name] + gradient if name in sums else gradient
        return total.detach(), sums


def build_model(
    create: CreateModel,
    context: BuildContext,
    options: BaseModel,
    stages: int = 1,
    chunks: int = 1,
    layers: ParallelLayers | None = None,
) -> Built:
    """Build every chunk of a ``stages`` x ``chunks`` cut from ``layers``, initialised and with gradients.

    ``layers`` defaults to dense layers. The model's layers are distributed as evenly as possible; each stage has its
    own copy of a tied parameter.
    """
    model, layers = create(context, options), layers or DenseLayers(context)
    layers_of_model: int = getattr(options, "num_layers")  # noqa: B009  # unknown to types
    share, over = divmod(layers_of_model, stages * chunks)
    counts = tuple(share + (place < over) for place in range(stages * chunks))  # a place may be empty
    layout = looped_layout(LayoutSpec(stages, chunks, layers_of_model, counts))
    shared: list[dict[str, nn.Parameter]] = [{} for _ in range(stages)]
    built = tuple(
        model.build_chunk(position, layout, layers, shared[place.stage]) for position, place in enumerate(layout)
    )
    return Built(model, layout, built, prepare(context, built))
