"""The options, and the entry points for the engine: how often each region is recorded, in which pools, with what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import CaptureSize
from megatron_run.errors import InputError
from megatron_run_engine.capture import (
    STEP,
    Pass,
    Recorded,
    RegionCapture,
    StepGraph,
    by_chunk,
    chained,
    check_capture,
    every_segment,
    kept_streams,
    passes,
    recordings,
    shared_slots,
    slots_by_chunk,
)
from megatron_run_graph_capture_partial.recording import Recording, StaticTensors

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Action, Region, Segment
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.capture import Backend
    from megatron_run_engine.runtime import BuildContext


class PartialOptions(BaseModel):
    """Options of the capture: of which regions, how often, and what happens on a mismatch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] = Field(
        ("attn",),
        min_length=1,
        description="segments; those of gpt: embedding, attn, mlp, head, loss, and of experts moe_router, "
        "moe_preprocess, moe_dispatch, moe_experts, moe_combine; or step: forward and backward of all of it as one",
    )
    graph_reuse: Literal["per_microbatch", "per_slot"] = Field(
        "per_microbatch", description="graphs per microbatch of a round, or per microbatch in flight"
    )
    capture_after: int = Field(1, ge=1, description="eager steps before the capture")
    strict: bool = Field(False, description="a mismatch raises an error instead of another capture")
    chain: bool = Field(True, description="read a region's inputs in place from the previous one")


def check_config(config: Config, options: PartialOptions) -> Iterator[str]:
    """Notice if nothing would be captured. Raises InputError for settings that exclude replay or break ``strict``."""
    yield from check_capture("partial", config, options, recomputes=True, whole_step=True)
    if STEP in options.scope and options.graph_reuse == "per_slot":
        raise InputError(
            "graph-capture.scope=step with graph_reuse=per_slot",
            why="a whole step is one graph, which no microbatch replays for another",
            fix="leave one of them out",
        )


#: (chunk, microbatch or copy)
Key = tuple[int, int]


class Reuse(NamedTuple):
    """Which copies of a region are recorded, and which microbatch replays which copy.

    ``recorded`` is the order of recording. ``copies`` maps (chunk, microbatch) to the copy that it replays; ``slots``
    maps (chunk, copy) to one of ``slot_count`` slots of static inputs, and ``pools`` to the pool that holds its memory.
    """

    recorded: tuple[Pass, ...]
    copies: Mapping[Key, int]
    slots: Mapping[Key, int]
    slot_count: int
    pools: Mapping[Key, int]


def per_microbatch(order: Sequence[Pass], chunks: int) -> Reuse:
    """Graphs of every microbatch of a round, in one pool, in the order of the run: many graphs, little memory.

    A round ends when nothing is in flight; rounds that are alike share their graphs
    (:func:`megatron_run_engine.capture.recordings`).
    """
    recorded, copies = recordings(order, chunks)
    slots = shared_slots(recorded)
    return Reuse(recorded, copies, slots.of, slots.count, dict.fromkeys(slots.of, 0))


def per_slot(order: Sequence[Pass], chunks: int) -> Reuse:
    """The fewest possible graphs: one set per chunk (whose weights are fixed) and slot.

    Each set has its own pool, since its graphs replay between those of any other set: no order of reuse is safe.
    """
    by_chunk = slots_by_chunk(order, chunks)
    keys = [(chunk, slot) for chunk, slots in enumerate(by_chunk) for slot in range(slots.count)]
    recorded = tuple(Pass(kind, *key) for key in keys for kind in ("F", "B", "end"))
    copies = {key: slot for slots in by_chunk for key, slot in slots.of.items()}
    numbers = {key: number for number, key in enumerate(keys)}
    return Reuse(recorded, copies, numbers, len(keys), numbers)


class PartialCapture(RegionCapture):
    """Captures the segments of ``options.scope``; ``find_backend`` is called when something is recorded."""

    def __init__(self, context: BuildContext, options: PartialOptions, find_backend: Callable[[], Backend]) -> None:
        super().__init__(context, options)
        self._by_slot, self._chain = options.graph_reuse == "per_slot", options.chain
        self._find_backend = find_backend
        self.whole_step = STEP in options.scope
        self.captures_steps = True
        self._step: StepGraph | None = None

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
        read = self.take_read(regions)
        self._step = StepGraph(run, regions, actions, self.context, read=read, backend=self._find_backend())
        return self._step.size

    def replay_step(self) -> None:
        """Replay the recorded step."""
        assert self._step is not None  # replays happen between capture and invalidate only
        self._step.replay()

    def mismatch(self, actions: Sequence[Action]) -> str:
        """Return what has changed since the capture."""
        return super().mismatch(actions) if self._step is None else self._step.mismatch(actions)

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
