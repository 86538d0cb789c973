"""The options, and the entry points for the engine: the regions of the run, recorded by Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import CaptureSize
from megatron_run_engine.capture import (
    Recorded,
    RegionCapture,
    by_chunk,
    check_capture,
    kept_streams,
    passes,
    recordings,
    shared_slots,
)
from megatron_run_graph_capture_te.handover import GraphedRegion, check_inputs, check_order, prepare
from megatron_run_graph_capture_te.library import Engine, captures_of_one_thread

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import Action, Region, Segment
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext


class TeOptions(BaseModel):
    """Options of the capture: of which regions, when, and what happens on a mismatch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] = Field(
        ("attn",),
        min_length=1,
        description="segments; those of gpt: attn, mlp, head, loss, and of experts moe_router, moe_preprocess, "
        "moe_dispatch, moe_experts, moe_combine",
    )
    capture_after: int = Field(3, ge=1, description="eager steps before the capture")
    strict: bool = Field(False, description="a mismatch raises an error instead of another capture")
    warmup: int = Field(3, ge=1, description="runs of each region before it is recorded")


def check_config(config: Config, options: TeOptions) -> Iterator[str]:
    """Notice if nothing would be captured. Raises InputError for settings that exclude replay or break ``strict``."""
    yield from check_capture("te", config, options)


class TeCapture(RegionCapture):
    """Captures the segments of ``options.scope``; ``find_engine`` is called when something is captured."""

    def __init__(self, context: BuildContext, options: TeOptions, find_engine: Callable[[], Engine]) -> None:
        super().__init__(context, options)
        self._warmup, self._find_engine = options.warmup, find_engine

    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        """Return the regions of neighbouring segments in the scope. Raises InputError for one that is unsupported."""
        found = super().regions(chunks)
        if self.context.topology.sizes.world == 1:  # with all chunks at hand, as also while a run is planned
            check_inputs(found, chunks)
        return found

    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        """The size that follows from the order of the actions. Raises GraphCaptureError for what is unsupported."""
        if regions:
            check_order(actions)
        order = recordings(passes(actions, len(self.chunks)), len(self.chunks)).passes
        of_chunk = by_chunk(regions, len(self.chunks))
        graphs = sum(
            each.kind == "F" or region.differentiable
            for each in order
            if each.kind != "end"
            for region in of_chunk[each.chunk]
        )
        return CaptureSize(len(regions), graphs, shared_slots(order).count)

    def record(
        self, regions: Sequence[Region], actions: Sequence[Action], examples: Mapping[Region, tuple[Tensor, ...]]
    ) -> Recorded:
        """Make the checks that the library omits, then let it record."""
        engine, of_chunk, rng = self._find_engine(), by_chunk(regions, len(self.chunks)), self.context.rng
        check_order(actions)
        order, copies = recordings(passes(actions, len(self.chunks)), len(self.chunks))
        handover = prepare(of_chunk, order, examples, self.linted, self.context.device)
        around = engine.registering([rng.replicated]), captures_of_one_thread()
        with kept_streams(rng.streams), self.context.gradients.recording() as arrived, around[0], around[1]:
            made = handover.call(engine.make_graphed_callables, self._warmup)
        arrivals = {region: self._arrivals(region, frozenset(arrived)) for regions in of_chunk for region in regions}
        recorded = {
            (region, copy): GraphedRegion(
                run,
                arrivals[region],
                first=region is of_chunk[region.chunk][0],
                last=region is of_chunk[region.chunk][-1],
                differentiable=tuple(output.requires_grad for output in self.linted[region].outputs),
            )
            for (region, copy), run in zip(handover.places, made, strict=True)
        }
        static = {id(tensor): tensor.nbytes for tensors in handover.sample_args for tensor in tensors}
        graphs = len(recorded) + sum(graphed.has_backward for graphed in recorded.values())
        size = CaptureSize(len(regions), graphs, handover.slot_count, sum(static.values()))
        return Recorded(recorded, copies, size)

    def _arrivals(self, region: Region, arrived: Set[Parameter]) -> tuple[Parameter, ...]:
        """The parameters whose gradients a replayed backward of ``region`` adds to their ``main_grad``.

        These are always the gradients that layers submit themselves. The library returns the others to autograd, whose
        hooks report them; but a release that records ``torch.autograd.backward`` also records the hooks' additions,
        and then their parameters ``arrived`` while recording.
        """
        handed_over = self.linted[region].handed_over
        others = {p: None for segment in region.segments for p in segment.params if p in arrived}
        return (*handed_over, *(p for p in others if p not in frozenset(handed_over)))
