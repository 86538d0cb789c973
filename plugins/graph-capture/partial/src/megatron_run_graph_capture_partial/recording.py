"""Recording: every region's forward and backward, in the order in which the run will replay them.

Graphs of overlapping lifetimes share one pool, which is safe because they replay in the order of recording. An output
keeps its memory until its own backward is recorded, an input gradient until the preceding layer has consumed it. With a
split backward both live until W, since the deferred work of eager layers still reads them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_run_engine.capture import Backend, Place, blamed, call, run_backward, zeros_like
from megatron_run_engine.runtime import main_grad
from megatron_run_graph_capture_partial.region_graph import RegionGraph, trained

if TYPE_CHECKING:
    from collections.abc import Hashable

    from megatron_run.contracts import Region
    from megatron_run_engine.capture import Pass
    from megatron_run_engine.runtime import GradientAccumulator

#: (chunk, copy)
Key = tuple[int, int]


class StaticTensors:
    """The tensors filled before a replay: inputs, one set per slot, and gradients of outputs, shared by all slots."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[Hashable, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Their size in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def inputs(self, slot: int, place: int, examples: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inputs of ``slot`` shaped like ``examples``; ``place`` distinguishes sets that are in use together."""
        alike = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in examples)
        keys = ((slot, place, index, alike) for index in range(len(examples)))
        return tuple(self._get(key, example) for key, example in zip(keys, examples, strict=True))

    def gradient(self, index: int, output: Tensor) -> Tensor:
        """The buffer for the gradient of the ``index``-th output, filled just before any region's backward replays."""
        return self._get((index, tuple(output.shape), output.dtype), output.detach())

    def _get(self, key: Hashable, example: Tensor) -> Tensor:
        if key not in self._tensors:
            self._tensors[key] = zeros_like(example, self._device)
        return self._tensors[key]


class _Open(NamedTuple):
    """A recorded forward that still awaits its backward, and the tensors that the backward reads."""

    graph: RegionGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class _Gradient(NamedTuple):
    """A gradient: ``tensor`` keeps its memory from others while they are recorded, ``place`` is for the replays."""

    tensor: Tensor
    place: Place


class Recording:
    """Records the regions of ``chunks``; ``chained`` maps a region to the one whose outputs are its inputs.

    ``examples`` are the inputs of each region on the meta device.
    """

    def __init__(
        self,
        backend: Backend,
        gradients: GradientAccumulator,
        chunks: Sequence[Sequence[Region]],
        examples: Mapping[Region, Sequence[Tensor]],
        chained: Mapping[Region, Region],
        static: StaticTensors,
    ) -> None:
        self._backend, self._gradients, self._static = backend, gradients, static
        self._chunks, self._examples, self._chained = chunks, examples, chained
        self._places = {region: place for regions in chunks for region, place in self._number(regions)}
        self._open: dict[tuple[Region, int], _Open] = {}
        self._input_gradients: dict[Key, list[tuple[Region, dict[str, _Gradient]]]] = defaultdict(list)
        self._read_later: dict[Key, list[object]] = defaultdict(list)
        self.graphs: dict[tuple[Region, int], RegionGraph] = {}

    def record(
        self, order: Sequence[Pass], slots: Mapping[Key, int], pool_of: Callable[[int, int], Any], *, split: bool
    ) -> None:
        """Record each pass of ``order``, with memory from ``pool_of(chunk, copy)``.

        ``slots`` gives the slot of static inputs for a chunk and copy. With a ``split`` backward, tensors stay alive
        until the pass ``end``, since W reads them after the last region's backward even if it follows at once.
        """
        for kind, chunk, copy in order:
            regions, key = self._chunks[chunk], (chunk, copy)
            if kind == "F":
                for region in regions:
                    self._forward(region, copy, slots[key], pool_of(*key))
            elif kind == "B":
                for region in reversed(regions):
                    self._backward(region, copy, pool_of(*key), keep=split)
            else:
                self._input_gradients.pop(key, None)
                self._read_later.pop(key, None)

    def _number(self, regions: Sequence[Region]) -> list[tuple[Region, int]]:
        """Number the regions of a chunk whose inputs look alike: each needs its own static inputs."""
        seen: Counter[Hashable] = Counter()
        found = []
        for region in regions:
            alike = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in self._examples[region])
            found.append((region, seen[alike]))
            seen[alike] += region not in self._chained
        return found

    def _forward(self, region: Region, copy: int, slot: int, pool: Any) -> None:
        before = self._chained.get(region)
        if before is None:
            inputs = self._static.inputs(slot, self._places[region], self._examples[region])
            places = tuple(Place.static(x) for x in inputs)
        else:
            inputs, places = self._handed_on(before, copy, region)
        regions = self._chunks[region.chunk]
        graph = RegionGraph(
            region,
            self._backend.graph(),
            places,
            chained=before is not None,
            first=region is regions[0],
            last=region is regions[-1],
        )
        with torch.enable_grad(), blamed(str(region), "forward"), graph.forward.capture(pool):
            outputs = call(region, inputs)
        graph.outputs = tuple(Place.of_result(output, graph.forward, places) for output in outputs)
        self._open[region, copy] = _Open(graph, inputs, outputs)
        self.graphs[region, copy] = graph

    def _handed_on(self, before: Region, copy: int, region: Region) -> tuple[tuple[Tensor, ...], tuple[Place, ...]]:
        """The outputs of ``before`` that ``region`` reads, detached from their history, and their places."""
        graph, _, outputs = self._open[before, copy]
        left = dict(zip(before.outputs, zip(outputs, graph.outputs, strict=True), strict=True))
        read = [left[name] for name in region.inputs]
        return tuple(x.detach().requires_grad_(x.requires_grad) for x, _ in read), tuple(place for _, place in read)

    def _backward(self, region: Region, copy: int, pool: Any, *, keep: bool) -> None:
        graph, inputs, outputs = self._open.pop((region, copy))
        key = (region.chunk, copy)
        if keep:
            self._read_later[key] += [output.detach() for output in outputs]
        graph.input_gradients = (None,) * len(inputs)
        given = self._output_gradients(region, key, outputs)
        graph.output_gradients = tuple(None if gradient is None else gradient.place for gradient in given)
        if not any(output.requires_grad for output in outputs):
            return
        graph.backward = self._backend.graph()
        with self._gradients.recording() as arrivals, blamed(str(region), "backward"), graph.backward.capture(pool):
            found = self._record_backward(region, inputs, outputs, [each.tensor for each in given if each is not None])
        graph.arrivals = tuple(arrivals)
        around = [place for place in (*graph.inputs, *graph.outputs, *graph.output_gradients) if place is not None]
        made = [g if g is None else _Gradient(g, Place.of_result(g, graph.backward, around)) for g in found]
        graph.input_gradients = tuple(None if gradient is None else gradient.place for gradient in made)
        by_name = {name: gradient for name, gradient in zip(region.inputs, made, strict=True) if gradient is not None}
        self._keep_gradients(region, key, by_name, keep=keep)

    def _output_gradients(self, region: Region, key: Key, outputs: Sequence[Tensor]) -> list[_Gradient | None]:
        """Gradients of the outputs: those of the region that follows directly in place, else static buffers."""
        after = {name: g for other, made in self._input_gradients[key] for name, g in made.items()
                 if self._chained.get(other) is region}  # fmt: skip
        return [
            None if not output.requires_grad else after.get(name) or self._static_gradient(index, output)
            for index, (name, output) in enumerate(zip(region.outputs, outputs, strict=True))
        ]

    def _static_gradient(self, index: int, output: Tensor) -> _Gradient:
        buffer = self._static.gradient(index, output)
        return _Gradient(buffer, Place.static(buffer))

    def _record_backward(
        self, region: Region, inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The inputs' gradients from ``given``. The graph also adds parameters' gradients to their ``main_grad``."""
        roots = [output for output in outputs if output.requires_grad]
        parameters = trained(region)
        wanted = [x for x in inputs if x.requires_grad]
        found = run_backward(roots, given, [*wanted, *parameters])
        for parameter, gradient in zip(parameters, found[len(wanted) :], strict=True):
            if gradient is not None:  # None: the layer has submitted its gradient to the accumulator
                main_grad(parameter).add_(gradient)
                self._gradients.arrived([parameter])
        shared = {gradient.untyped_storage().data_ptr() for gradient in given}
        of_inputs = iter(found)
        return [_own(next(of_inputs), shared) if x.requires_grad else None for x in inputs]

    def _keep_gradients(self, region: Region, key: Key, made: dict[str, _Gradient], *, keep: bool) -> None:
        """Keep ``made`` alive until the preceding layer has read it; those of later layers have been read already."""
        layer = region.segments[0].layer
        held = self._input_gradients[key]
        if not keep:
            held = [(other, gradients) for other, gradients in held if other.segments[0].layer == layer]
        self._input_gradients[key] = [*held, (region, made)]


def _own(gradient: Tensor | None, shared: set[int]) -> Tensor | None:
    """``gradient``, copied if it aliases a static buffer that the next backward overwrites."""
    if gradient is None or gradient.untyped_storage().data_ptr() not in shared:
        return gradient
    return gradient.clone()
