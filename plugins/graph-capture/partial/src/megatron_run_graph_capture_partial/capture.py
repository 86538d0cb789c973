"""What the kernel calls: regions, one capture for the order of the run, and a replay wherever a region would run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_run.contracts import CaptureSize, GraphCapture
from megatron_run.errors import GraphCaptureError
from megatron_run.gradients import main_grad
from megatron_run.graphs import OrderGuard, by_chunk, call, chained, check_scope, choose_regions, kept_streams, lint
from megatron_run.graphs import passes as passes_of
from megatron_run_graph_capture_partial.recording import Recording, StaticTensors
from megatron_run_graph_capture_partial.region_graph import RegionGraph, replay
from megatron_run_graph_capture_partial.reuse import Reuse, per_microbatch, per_slot

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.actions import Action
    from megatron_run.contracts import BuildContext, Microbatch, Region, Segment
    from megatron_run_graph_capture_partial.backend import Backend
    from megatron_run_graph_capture_partial.options import PartialOptions

#: (step, chunk, microbatch)
_Pair = tuple[int, int, int]


class Event(NamedTuple):
    """A replay as the order knows it."""

    kind: str
    region: Region
    microbatch: int

    def __str__(self) -> str:
        name = "forward" if self.kind == "F" else "backward"
        return f"the {name} of {self.region} for microbatch {self.microbatch}"


class _Captured(NamedTuple):
    """What there is to replay, and what it relies on."""

    actions: tuple[Action, ...]
    examples: Mapping[Region, tuple[Tensor, ...]]
    graphs: Mapping[tuple[Region, int], RegionGraph]
    copies: Mapping[tuple[int, int], int]
    guard: OrderGuard
    pools: Sequence[Any]
    addresses: Mapping[Parameter, tuple[int, int]]


class PartialCapture(GraphCapture):
    """Captures the segments of ``options.scope`` with the backend that ``find_backend`` gives once it is needed."""

    def __init__(self, context: BuildContext, options: PartialOptions, find_backend: Callable[[], Backend]) -> None:
        self._context, self._options, self._find_backend = context, options, find_backend
        self.capture_after = options.capture_after
        self._chunks: Sequence[Sequence[Segment]] = ()
        self._captured: _Captured | None = None
        self._misfit = ""
        self._eager: set[_Pair] = set()

    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        """Neighbours whose names are in the scope go together."""
        self._chunks = chunks
        check_scope(self._options.scope, chunks, self._context)
        return choose_regions(chunks, self._options.scope)

    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        """From the order of the actions alone."""
        reuse, of_chunk = self._reuse(actions), by_chunk(regions, len(self._chunks))
        graphs = sum(len(of_chunk[each.chunk]) for each in reuse.recorded if each.kind != "end")
        return CaptureSize(len(regions), graphs, reuse.slot_count)

    def capture(
        self,
        regions: Sequence[Region],
        actions: Sequence[Action],
        examples: Mapping[Region, tuple[Tensor, ...]],
    ) -> CaptureSize:
        """Try every region by the rules, then record it for each microbatch or slot."""
        context, generators = self._context, (self._context.rng.sharded, self._context.rng.replicated)
        for region in regions:
            if region not in examples:
                raise GraphCaptureError(f"{region} has not run yet", why="what it is given is not known")
            lint(region, examples[region], context.device, context.gradients, generators)
        reuse, static, backend = self._reuse(actions), StaticTensors(context.device), self._find_backend()
        of_chunk = by_chunk(regions, len(self._chunks))
        links = chained(regions, self._chunks) if self._options.chain else {}
        pools = [backend.pool() for _ in range(1 + max(reuse.pools.values(), default=-1))]
        recording = Recording(backend, context.gradients, of_chunk, examples, links, static)
        with kept_streams(generators):
            recording.record(reuse.recorded, reuse.slots, lambda chunk, copy: pools[reuse.pools[chunk, copy]])
        graphs = recording.graphs
        self._captured = _Captured(
            tuple(actions),
            examples=dict(examples),
            graphs=graphs,
            copies=reuse.copies,
            guard=OrderGuard(self._events(actions, of_chunk, graphs, reuse)),
            pools=pools,
            addresses={p: _addresses(p) for region in regions for segment in region.segments for p in segment.params},
        )
        count = len(graphs) + sum(graph.backward is not None for graph in graphs.values())
        return CaptureSize(len(regions), count, reuse.slot_count, static.nbytes, backend.pool_bytes(pools))

    def misfit(self, actions: Sequence[Action]) -> str:
        """Whether the actions, the shapes and the places of parameters are still those that were captured."""
        captured = self._captured
        if captured is None:
            return "nothing is captured"
        if captured.actions != tuple(actions):
            return f"a step of {_microbatches(actions)} microbatches follows steps of {_microbatches(captured.actions)}"
        moved = sum(_addresses(parameter) != places for parameter, places in captured.addresses.items())
        return self._misfit or (f"{moved} parameters or their gradients were moved in memory" if moved else "")

    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replay ``region``'s graphs; what has another shape runs eagerly, and another capture follows."""
        captured = self._captured
        assert captured is not None  # the kernel replays between capture and invalidate
        if not self._fits(captured, region, microbatch, tensors):
            return call(region, tensors)
        graph = captured.graphs[region, captured.copies[region.chunk, microbatch.index]]
        check = captured.guard.check
        hooks = (
            partial(check, Event("F", region, microbatch.index), microbatch.step),
            partial(check, Event("B", region, microbatch.index), microbatch.step),
            partial(self._context.gradients.arrived, graph.arrivals),
        )
        return replay(graph, hooks, tensors)

    def invalidate(self, reason: str) -> None:
        """Give the graphs and their memory back; an error under ``strict``."""
        if self._options.strict:
            raise GraphCaptureError(
                f"what was captured no longer fits: {reason}",
                fix="leave graph-capture.strict out to capture again, at the cost of a pause",
            )
        self._context.log.warning("graphs will be captured again: %s", reason)
        self._captured, self._misfit = None, ""
        self._eager.clear()

    def _reuse(self, actions: Sequence[Action]) -> Reuse:
        order = passes_of(actions, len(self._chunks))
        return per_slot(order, len(self._chunks)) if self._options.graph_reuse == "per_slot" else per_microbatch(order)

    def _events(
        self,
        actions: Sequence[Action],
        of_chunk: Sequence[Sequence[Region]],
        graphs: Mapping[tuple[Region, int], RegionGraph],
        reuse: Reuse,
    ) -> Iterable[Event]:
        """Every replay of a step, in order."""
        for kind, chunk, microbatch in passes_of(actions, len(self._chunks)):
            if kind == "F":
                yield from (Event("F", region, microbatch) for region in of_chunk[chunk])
            elif kind == "B":
                copy = reuse.copies[chunk, microbatch]
                differentiable = (r for r in reversed(of_chunk[chunk]) if graphs[r, copy].backward is not None)
                yield from (Event("B", region, microbatch) for region in differentiable)

    def _fits(self, captured: _Captured, region: Region, microbatch: Microbatch, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors`` are like those of the capture. From the first that is not on, the chunk runs eagerly."""
        pair = (microbatch.step, region.chunk, microbatch.index)
        if pair not in self._eager:
            fault = _difference(captured.examples[region], tensors)
            if not fault:
                return True
            self._misfit = f"{region} was given {fault}"
            if self._options.strict:
                self.invalidate(self._misfit)
            self._eager = {other for other in self._eager if other[0] == microbatch.step} | {pair}
        captured.guard.leave_out([Event(kind, region, microbatch.index) for kind in "FB"], microbatch.step)
        return False


def _addresses(parameter: Parameter) -> tuple[int, int]:
    return parameter.data_ptr(), main_grad(parameter).data_ptr()


def _microbatches(actions: Sequence[Action]) -> int:
    return len({action.microbatch for action in actions if action.op == "F"})


def _difference(examples: Sequence[Tensor], tensors: Sequence[Tensor]) -> str:
    """How the first of ``tensors`` that is not like its example differs; empty where all are alike."""
    for example, tensor in zip(examples, tensors, strict=True):
        if (example.shape, example.dtype) != (tensor.shape, tensor.dtype):
            return f"{tuple(tensor.shape)} {tensor.dtype} and was captured with {tuple(example.shape)} {example.dtype}"
        if example.requires_grad != tensor.requires_grad and torch.is_grad_enabled():
            return f"a tensor with requires_grad={tensor.requires_grad}, unlike the captured one"
    return ""
