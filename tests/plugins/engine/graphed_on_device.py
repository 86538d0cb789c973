"""In the place of ``make_graphed_callables`` of Transformer Engine: graphs that hold what the library's graphs hold.

Inputs, and gradients of outputs, are tensors outside of the pool; regions whose tensors look alike share the latter. A
region's outputs are held until its backward is recorded, the gradients of its inputs until that of the region before it
is, and those of parameters, which a replay returns as copies, not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_run_engine.capture import run_backward
from megatron_run_engine.capture.graphs import weak_alias
from megatron_run_engine.runtime.gradients import GradientAccumulator
from megatron_run_graph_capture_te.library import Engine
from tests.plugins.device_graphs import DeviceBackend, Pool


class DeviceLibrary:
    """One ``make_graphed_callables`` whose graphs draw from ``generators``, and the module ``distributed``."""

    def __init__(self, gradients: GradientAccumulator, generators: Sequence[torch.Generator]) -> None:
        self.gradients, self.backend = gradients, DeviceBackend(generators)
        self.states: dict[str, torch.Generator] = {}

    @property
    def engine(self) -> Engine:
        """The library."""
        return Engine(self, self)

    def get_all_rng_states(self) -> dict[str, torch.Generator]:
        return self.states

    def set_all_rng_states(self, states: dict[str, torch.Generator]) -> None:
        self.states = states

    def __call__(
        self, modules: tuple[nn.Module, ...], sample_args: list[tuple[Tensor, ...]], **options: Any
    ) -> tuple[Callable[..., Any], ...]:
        order, counts = options["_order"], options["_num_layers_per_chunk"]
        copies, pool = order.count(1), self.backend.pool()
        graphed: list[list[list[_Graphed]]] = []  # by chunk, copy and region, as the arguments are
        arguments, layers = iter(sample_args), iter(modules)
        for count in counts:
            regions = [next(layers) for _ in range(count)]
            graphed.append([[_Graphed(self, each, next(arguments)) for each in regions] for _ in range(copies)])
        gradients: dict[Hashable, list[Tensor]] = {}
        seen = defaultdict[int, int](int)
        for number in order:
            regions_of_copy = graphed[abs(number) - 1][seen[number]]
            seen[number] += 1
            if number > 0:
                for each in regions_of_copy:
                    each.record_forward(pool)
                continue
            after: list[Tensor] = []
            for each in reversed(regions_of_copy):
                after = each.record_backward(pool, gradients, after)
        return tuple(each for chunk in graphed for regions_of_copy in chunk for each in regions_of_copy)


class _Graphed:
    """The graphs of one region and copy."""

    def __init__(self, library: DeviceLibrary, module: nn.Module, sample: tuple[Tensor, ...]) -> None:
        self._library, self._module, self.inputs = library, module, sample
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.forward, self.backward = library.backend.graph(), library.backend.graph()
        self.held: tuple[Tensor, ...] = ()

    def record_forward(self, pool: Pool) -> None:
        with torch.enable_grad(), self.forward.capture(pool):
            self.held = self._module(*self.inputs)
        self.outputs = [weak_alias(output) for output in self.held]
        self.differentiable = [output.requires_grad for output in self.held]

    def record_backward(self, pool: Pool, gradients: dict[Hashable, list[Tensor]], after: list[Tensor]) -> list[Tensor]:
        """Record it and return the gradients of inputs, which are to be held; those of the region ``after`` were."""
        roots, self.held = [output for output in self.held if output.requires_grad], ()
        alike = tuple((root.shape, root.dtype) for root in roots)
        if alike not in gradients:
            gradients[alike] = [torch.empty_like(root) for root in roots]
        self.given, wanted = gradients[alike], [x for x in (*self.inputs, *self.parameters) if x.requires_grad]
        with self.backward.capture(pool):
            found = run_backward(roots, self.given, wanted)
        after.clear()
        self.found = [None if gradient is None else weak_alias(gradient) for gradient in found]
        return [g for g, x in zip(found, wanted, strict=True) if g is not None and x not in {*self.parameters}]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        left: tuple[Tensor, ...] = _Replay.apply(self, *tensors, *self.parameters)  # type: ignore[no-untyped-call]  # torch's
        return left


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: _Graphed, *tensors: Tensor) -> tuple[Tensor, ...]:
        for place, tensor in zip(graphed.inputs, tensors, strict=False):
            if place.data_ptr() != tensor.data_ptr():
                place.detach().copy_(tensor)
        graphed.forward.replay()
        ctx.graphed = graphed
        return tuple(output.detach() for output in graphed.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        graphed: _Graphed = ctx.graphed
        graded = (g for g, graded in zip(gradients, graphed.differentiable, strict=True) if graded)
        for place, gradient in zip(graphed.given, graded, strict=True):
            if place.data_ptr() != gradient.data_ptr():
                place.copy_(gradient)
        graphed.backward.replay()
        found = iter(graphed.found)
        of_inputs = [next(found) if x.requires_grad else None for x in graphed.inputs]
        of_parameters = [None if g is None else g.clone() for g in found]
        return (None, *(None if g is None else g.detach() for g in of_inputs), *of_parameters)
