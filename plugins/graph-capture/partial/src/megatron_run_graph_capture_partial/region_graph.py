"""One recorded region: its two graphs, the addresses of their tensors, and the autograd function that replays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_run.errors import GraphCaptureError
from megatron_run_engine.capture import Graph, Place

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Region
    from megatron_run_engine.capture import Hooks


@dataclass(eq=False)
class RegionGraph:
    """A region's forward and backward at fixed addresses.

    ``inputs``, ``outputs``, ``output_gradients`` and ``input_gradients`` are these addresses, None without gradient.
    ``chained`` inputs are the preceding region's outputs, in place. ``arrivals`` are the parameters whose gradients the
    backward adds to their ``main_grad``. Outputs of the ``last`` region of a chunk and input gradients of the ``first``
    leave as copies: a message or the next chunk may read them after the graph's memory is reused.
    """

    region: Region
    forward: Graph
    inputs: tuple[Place, ...]
    chained: bool
    first: bool
    last: bool
    outputs: tuple[Place, ...] = ()
    backward: Graph | None = None
    output_gradients: tuple[Place | None, ...] = ()
    input_gradients: tuple[Place | None, ...] = ()
    arrivals: tuple[Parameter, ...] = field(default=())

    @property
    def has_backward(self) -> bool:
        """Whether any output depends differentiably on an input or a parameter."""
        return self.backward is not None

    def replay(self, hooks: Hooks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay the region on ``tensors``; differentiable."""
        hooks.before_forward()
        grows = any(tensor.requires_grad for tensor in tensors)
        # Autograd records no backward if no input requires a gradient (tokens): pass a parameter as well.
        anchor = () if grows or self.backward is None else trained(self.region)[:1]
        result: tuple[Tensor, ...] = _Replay.apply(self, hooks, *tensors, *anchor)  # type: ignore[no-untyped-call]  # torch's
        return result

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy ``tensors`` to the static inputs, unless they are already there."""
        for place, tensor in zip(self.inputs, tensors, strict=True):
            if place.tensor.data_ptr() == tensor.data_ptr():
                continue
            if self.chained:
                raise GraphCaptureError(
                    f"{self.region} was given something else than the region before it left",
                    why="the model changes it in between, outside of any segment",
                    fix="set graph-capture.chain=false",
                )
            place.tensor.copy_(tensor)

    def load_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Copy the outputs' ``gradients`` to their static buffers."""
        for place, gradient in zip(self.output_gradients, gradients, strict=True):
            if place is not None and place.tensor.data_ptr() != gradient.data_ptr():
                place.tensor.copy_(gradient)


def trained(region: Region) -> list[Parameter]:
    """The region's parameters that require a gradient, each once."""
    return list({id(p): p for segment in region.segments for p in segment.params if p.requires_grad}.values())


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: RegionGraph, hooks: Hooks, *tensors: Tensor) -> tuple[Tensor, ...]:
        graph.load(tensors[: len(graph.inputs)])
        graph.forward.replay()
        ctx.graph, ctx.hooks, ctx.given = graph, hooks, len(tensors)
        outputs = tuple(tensor.clone() if graph.last else tensor.detach() for tensor, _ in graph.outputs)
        pairs = zip(outputs, graph.output_gradients, strict=True)
        ctx.mark_non_differentiable(*(output for output, place in pairs if place is None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        graph: RegionGraph = ctx.graph
        ctx.hooks.before_backward()
        assert graph.backward is not None  # without one, forward marks every output as non-differentiable
        graph.load_gradients(gradients)
        graph.backward.replay()
        ctx.hooks.after_backward()
        found = [
            None if place is None else place.tensor.clone() if graph.first else place.tensor.detach()
            for place in graph.input_gradients
        ]
        return (None, None, *found, *[None] * (ctx.given - len(found)))
