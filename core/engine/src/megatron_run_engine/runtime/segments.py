"""The segment runner: before each segment it waits for parameters and positions random streams; it replays graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_run.errors import GraphCaptureError

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import GraphCapture, Microbatch, Region, Segment
    from megatron_run_engine.runtime.rng import RandomStreams

EnsureReady = Callable[[Iterable["Parameter"]], None]
Environment = dict[str, Tensor]


class SegmentRunner:
    """Runs segments, eagerly or from a captured graph.

    In both cases it first waits until the segment's parameters are ready (an optimizer may still be gathering them) and
    positions the random streams. That also happens when a checkpointed layer is recomputed in the backward, so the
    recomputation draws the same masks.
    """

    def __init__(self, rng: RandomStreams) -> None:
        self._rng = rng
        self._ensure_ready: EnsureReady | None = None
        self._capture: GraphCapture | None = None
        self._capture_name = ""
        self._regions: dict[int, Region] = {}
        self._examples: dict[Region, tuple[Tensor, ...]] = {}

    @property
    def examples(self) -> Mapping[Region, tuple[Tensor, ...]]:
        """The last inputs of each watched region in an eager step, as tensors without values on the meta device."""
        return self._examples

    def read_parameters_after(self, ensure_ready: EnsureReady) -> None:
        """From now on call ``ensure_ready`` with a segment's parameters before each run of it."""
        self._ensure_ready = ensure_ready

    def watch(self, regions: Sequence[Region]) -> None:
        """From now on record the inputs of ``regions`` when they run eagerly in training."""
        self._regions = {id(region.segments[0]): region for region in regions}
        self._examples.clear()

    def replay_with(self, capture: GraphCapture | None, name: str = "the graph capture") -> None:
        """From now on replay the watched regions by ``capture``, ``name`` in errors; None returns to eager runs."""
        self._capture, self._capture_name = capture, name

    def run(self, segments: Sequence[Segment], microbatch: Microbatch, environment: Environment) -> None:
        """Run a layer's ``segments`` in order, reading inputs from and writing outputs to ``environment``."""
        index = 0
        while index < len(segments):
            region = self._regions.get(id(segments[index])) if microbatch.train else None
            if region is not None and self._capture is not None:
                self._replay(self._capture, region, microbatch, environment)
                index += len(region.segments)
                continue
            if region is not None:
                self._examples[region] = tuple(_without_values(environment[name]) for name in region.inputs)
            self._run_eagerly(segments[index], microbatch, environment)
            index += 1

    def _run_eagerly(self, segment: Segment, microbatch: Microbatch, environment: Environment) -> None:
        self._make_ready(segment)
        self._rng.position(microbatch, segment.layer, segment.index)
        result = segment.fn(*(environment[name] for name in segment.inputs))
        outputs = result if isinstance(result, tuple) else (result,)
        environment.update(zip(segment.outputs, outputs, strict=True))

    def _replay(self, capture: GraphCapture, region: Region, microbatch: Microbatch, environment: Environment) -> None:
        last = region.segments[-1]
        for segment in region.segments:
            self._make_ready(segment)
        # Positions are set outside of the graph, which therefore draws other numbers in each replay.
        self._rng.position(microbatch, region.drawing.layer, region.drawing.index)
        outputs = capture.replay(region, microbatch, *(environment[name] for name in region.inputs))
        if not isinstance(outputs, tuple) or len(outputs) != len(region.outputs):
            raise self._no_outputs(region, outputs)
        environment.update(zip(region.outputs, outputs, strict=True))
        if region.drawing is not last:
            self._rng.position(microbatch, last.layer, last.index)  # as an eager run would leave the streams

    def _no_outputs(self, region: Region, returned: object) -> GraphCaptureError:
        found = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        return GraphCaptureError(
            f"{self._capture_name} replayed {region} and returned {found}",
            why=f"replay returns a tuple of {len(region.outputs)}, the region's outputs: {', '.join(region.outputs)}",
            fix="correct its replay, or choose --plugin graph-capture=none",
        )

    def _make_ready(self, segment: Segment) -> None:
        if self._ensure_ready is not None:
            self._ensure_ready(segment.params)


def _without_values(x: Tensor) -> Tensor:
    # Not empty_like: for the meta device it first imports the compiler's symbolic shapes, which takes seconds.
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
