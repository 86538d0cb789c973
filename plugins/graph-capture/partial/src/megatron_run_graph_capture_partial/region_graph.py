"""One region recorded once: its two graphs, where their tensors lie, and the autograd function that replays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_run.errors import GraphCaptureError
from megatron_run_graph_capture_partial.backend import Graph

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Region
    from megatron_run_engine.capture import Hooks


@dataclass(eq=False)
class RegionGraph:
    """A region's forward and backward at fixed addresses.

    ``inputs``, ``outputs``, ``output_gradients`` and ``input_gradients`` are where these lie, None where there is no
    gradient. ``chained`` inputs lie where the region before left them. ``arrivals`` are the parameters whose gradients
    the backward adds to their ``main_grad``. What leaves the chunk is handed out as a copy, since a message or the
    next chunk may read it after the graph's memory was given away: ``last`` of its chunk, ``first`` of its chunk.
    """

    region: Region
    forward: Graph
    inputs: tuple[Tensor, ...]
    chained: bool
    first: bool
    last: bool
    outputs: tuple[Tensor, ...] = ()
    backward: Graph | None = None
    output_gradients: tuple[Tensor | None, ...] = ()
    input_gradients: tuple[Tensor | None, ...] = ()
    arrivals: tuple[Parameter, ...] = field(default=())

    @property
    def has_backward(self) -> bool:
        """Whether any output depends on an input or a parameter in a way that can be differentiated."""
        return self.backward is not None

    def replay(self, hooks: Hooks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run it on ``tensors``; differentiable."""
        hooks.before_forward()
        grows = any(tensor.requires_grad for tensor in tensors)
        # Tokens have no gradient: then a parameter stands in, so that there is a backward at all.
        anchor = () if grows or self.backward is None else trained(self.region)[:1]
        result: tuple[Tensor, ...] = _Replay.apply(self, hooks, *tensors, *anchor)  # type: ignore[no-untyped-call]  # torch's
        return result

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Bring ``tensors`` to the inputs' places."""
        for place, tensor in zip(self.inputs, tensors, strict=True):
            if place.data_ptr() == tensor.data_ptr():
                continue
            if self.chained:
                raise GraphCaptureError(
                    f"{self.region} was given something else than the region before it left",
                    why="the model changes it in between, outside of any segment",
                    fix="set graph-capture.chain=false",
                )
            place.copy_(tensor)

    def load_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Bring the outputs' ``gradients`` to their places."""
        for place, gradient in zip(self.output_gradients, gradients, strict=True):
            if place is not None and place.data_ptr() != gradient.data_ptr():
                place.copy_(gradient)


def trained(region: Region) -> list[Parameter]:
    """The region's parameters that have a gradient, each once."""
    return list({id(p): p for segment in region.segments for p in segment.params if p.requires_grad}.values())


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: RegionGraph, hooks: Hooks, *tensors: Tensor) -> tuple[Tensor, ...]:
        graph.load(tensors[: len(graph.inputs)])
        graph.forward.replay()
        ctx.graph, ctx.hooks, ctx.given = graph, hooks, len(tensors)
        outputs = tuple(place.clone() if graph.last else place.detach() for place in graph.outputs)
        pairs = zip(outputs, graph.output_gradients, strict=True)
        ctx.mark_non_differentiable(*(output for output, place in pairs if place is None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        graph: RegionGraph = ctx.graph
        ctx.hooks.before_backward()
        assert graph.backward is not None  # nothing else of it could be differentiated
        graph.load_gradients(gradients)
        graph.backward.replay()
        ctx.hooks.after_backward()
        found = [
            None if place is None else place.clone() if graph.first else place.detach()
            for place in graph.input_gradients
        ]
        return (None, None, *found, *[None] * (ctx.given - len(found)))
