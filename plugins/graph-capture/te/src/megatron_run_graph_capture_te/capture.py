"""The plugin's entry points: the regions of the run, recorded by Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from megatron_run.contracts import CaptureSize
from megatron_run.errors import GraphCaptureError
from megatron_run_engine.capture import Recorded, RegionCapture, by_chunk, kept_streams, passes, shared_slots
from megatron_run_graph_capture_te.callables import GraphedRegion
from megatron_run_graph_capture_te.handover import check_order, prepare

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import Action, Region
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_graph_capture_te.options import TeOptions


#: Imports ``make_graphed_callables`` when something is captured.
FindEngine = Callable[[], Callable[..., Any]]


class TeCapture(RegionCapture):
    """Captures the segments of ``options.scope`` with the ``make_graphed_callables`` of ``find_engine``."""

    def __init__(self, context: BuildContext, options: TeOptions, find_engine: FindEngine) -> None:
        super().__init__(context, options)
        self._warmup, self._find_engine = options.warmup, find_engine

    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        """A forward and a backward of each region per microbatch. Raises GraphCaptureError for what is unsupported."""
        self._check_streams(regions)
        if regions:
            check_order(actions)
        order = passes(actions, len(self.chunks))
        of_chunk = by_chunk(regions, len(self.chunks))
        graphs = sum(len(of_chunk[each.chunk]) for each in order if each.kind != "end")
        return CaptureSize(len(regions), graphs, shared_slots(order).count)

    def record(
        self, regions: Sequence[Region], actions: Sequence[Action], examples: Mapping[Region, tuple[Tensor, ...]]
    ) -> Recorded:
        """Make the checks that the library omits, then let it record."""
        self._check_streams(regions)
        engine, of_chunk = self._find_engine(), by_chunk(regions, len(self.chunks))
        handover = prepare(of_chunk, actions, examples, self.context.device)
        with kept_streams(self.context.rng.streams), self.context.gradients.recording() as arrived:
            made = handover.call(engine, self._warmup)
        arrivals = {region: self._arrivals(region, frozenset(arrived)) for regions in of_chunk for region in regions}
        recorded = {
            (region, microbatch): GraphedRegion(
                run,
                arrivals[region],
                first=region is of_chunk[region.chunk][0],
                last=region is of_chunk[region.chunk][-1],
            )
            for (region, microbatch), run in zip(handover.places, made, strict=True)
        }
        pairs = {(region.chunk, microbatch) for region, microbatch in handover.places}
        static = {id(tensor): tensor.nbytes for tensors in handover.sample_args for tensor in tensors}
        size = CaptureSize(len(regions), 2 * len(recorded), handover.slot_count, sum(static.values()))
        return Recorded(recorded, {pair: pair[1] for pair in pairs}, size)

    def _arrivals(self, region: Region, arrived: Set[Parameter]) -> tuple[Parameter, ...]:
        """The parameters whose gradients a replayed backward of ``region`` adds to their ``main_grad``.

        These are always the gradients that layers submit themselves. The library returns the others to autograd, whose
        hooks report them; but a release that records ``torch.autograd.backward`` also records the hooks' additions,
        and then their parameters ``arrived`` while recording.
        """
        handed_over = self.handed_over[region]
        others = {p: None for segment in region.segments for p in segment.params if p in arrived}
        return (*handed_over, *(p for p in others if p not in frozenset(handed_over)))

    def _check_streams(self, regions: Sequence[Region]) -> None:
        drawing = [region for region in regions if region.drawing.draws]
        if drawing and self.context.topology.sizes.tensor > 1:
            raise GraphCaptureError(
                f"{drawing[0]} cannot be captured by graph-capture=te over tensor-parallel ranks",
                why="it draws from the stream that they share, of which Transformer Engine's graphs are not told",
                fix="set model.dropout=0, or choose --plugin graph-capture=partial",
            )
