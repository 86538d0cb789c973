"""The plugin's entry points: how often each region is recorded, in which pools, and with which backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_run.contracts import CaptureSize
from megatron_run_engine.capture import (
    STEP,
    Recorded,
    RegionCapture,
    by_chunk,
    chained,
    every_segment,
    kept_streams,
    passes,
    refusing_breaks,
)
from megatron_run_graph_capture_partial.recording import Recording, StaticTensors
from megatron_run_graph_capture_partial.reuse import Reuse, per_microbatch, per_slot

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Action, Region, Segment
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_graph_capture_partial.backend import Backend, Graph
    from megatron_run_graph_capture_partial.options import PartialOptions


class PartialCapture(RegionCapture):
    """Captures the segments of ``options.scope``; ``find_backend`` is called when something is recorded."""

    def __init__(self, context: BuildContext, options: PartialOptions, find_backend: Callable[[], Backend]) -> None:
        super().__init__(context, options)
        self._by_slot, self._chain = options.graph_reuse == "per_slot", options.chain
        self._find_backend = find_backend
        self.whole_step = STEP in options.scope
        self._step: Graph | None = None

    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        """Return the regions of neighbouring segments in the scope; of all segments if steps are captured whole."""
        if not self.whole_step:
            return super().regions(chunks)
        self.chunks = chunks
        return every_segment(chunks)

    def capture_step(
        self,
        run: Callable[[], None],
        regions: Sequence[Region],
        actions: Sequence[Action],
        examples: Mapping[Region, tuple[Tensor, ...]],
    ) -> CaptureSize:
        """Check every segment against the rules, then record the step in a pool of its own."""
        self.lint(regions, examples)
        backend = self._find_backend()
        graph, pool = backend.graph(), backend.pool()
        with kept_streams(self.context.rng.streams), refusing_breaks(), graph.capture(pool):
            run()
        size = CaptureSize(1, 1, 0, pool_bytes=backend.pool_bytes([pool]))
        self.keep(regions, actions, examples, Recorded({}, {}, size))
        self._step = graph
        return size

    def replay_step(self) -> None:
        """Replay the recorded step."""
        assert self._step is not None  # replays happen between capture and invalidate only
        self._step.replay()

    def invalidate(self, reason: str) -> None:
        """Free the graphs and their memory. Raises :class:`GraphCaptureError` with ``strict``."""
        super().invalidate(reason)
        self._step = None

    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        """The size that follows from the order of the actions alone."""
        if self.whole_step:
            return CaptureSize(1, 1, 0)
        reuse, of_chunk = self._reuse(actions), by_chunk(regions, len(self.chunks))
        graphs = sum(
            each.kind == "F" or region.differentiable
            for each in reuse.recorded
            if each.kind != "end"
            for region in of_chunk[each.chunk]
        )
        return CaptureSize(len(regions), graphs, reuse.slot_count)

    def record(
        self, regions: Sequence[Region], actions: Sequence[Action], examples: Mapping[Region, tuple[Tensor, ...]]
    ) -> Recorded:
        """Record each microbatch's or slot's forward and backward, in the order of the run."""
        context, reuse, backend = self.context, self._reuse(actions), self._find_backend()
        links = chained(regions, self.chunks) if self._chain else {}
        pools = [backend.pool() for _ in range(1 + max(reuse.pools.values(), default=-1))]
        static = StaticTensors(context.device)
        recording = Recording(backend, context.gradients, by_chunk(regions, len(self.chunks)), examples, links, static)
        with kept_streams(context.rng.streams):
            recording.record(
                reuse.recorded,
                reuse.slots,
                lambda chunk, copy: pools[reuse.pools[chunk, copy]],
                split=any(action.op == "W" for action in actions),
            )
        graphs = len(recording.graphs) + sum(graph.has_backward for graph in recording.graphs.values())
        size = CaptureSize(len(regions), graphs, reuse.slot_count, static.nbytes, backend.pool_bytes(pools))
        return Recorded(recording.graphs, reuse.copies, size)

    def _reuse(self, actions: Sequence[Action]) -> Reuse:
        order = passes(actions, len(self.chunks))
        return (per_slot if self._by_slot else per_microbatch)(order, len(self.chunks))
