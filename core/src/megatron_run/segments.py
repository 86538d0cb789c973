"""Runs the segments of layers: one place that waits for parameters, positions random numbers and replays graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import GraphCapture, Microbatch, Region, Segment
    from megatron_run.rng import RandomStreams

EnsureReady = Callable[[Iterable["Parameter"]], None]
Environment = dict[str, Tensor]


class SegmentRunner:
    """Runs segments eagerly or through a graph, the same way for both.

    Before a segment reads its parameters they are made ready (an optimizer may still be gathering them), and the
    random stream is positioned, also when a checkpointed layer runs again in the backward.
    """

    def __init__(self, rng: RandomStreams) -> None:
        self._rng = rng
        self._ensure_ready: EnsureReady | None = None
        self._capture: GraphCapture | None = None
        self._regions: dict[int, Region] = {}

    def read_parameters_after(self, ensure_ready: EnsureReady) -> None:
        """Call ``ensure_ready`` with a segment's parameters before each time it runs."""
        self._ensure_ready = ensure_ready

    def replay_with(self, capture: GraphCapture, regions: Sequence[Region]) -> None:
        """From now on run ``regions`` through ``capture``; an empty sequence goes back to eager."""
        self._capture = capture
        self._regions = {id(region.segments[0]): region for region in regions}

    def run(self, segments: Sequence[Segment], microbatch: Microbatch, environment: Environment) -> None:
        """Run a layer's ``segments`` in order, reading inputs from and writing outputs to ``environment``."""
        index = 0
        while index < len(segments):
            region = self._regions.get(id(segments[index])) if microbatch.train else None
            ran = region.segments if region else segments[index : index + 1]
            for segment in ran:
                self._prepare(segment, microbatch)
            outputs = self._replay(region, microbatch, environment) if region else _eager(ran[0], environment)
            environment.update(zip(ran[-1].outputs, outputs, strict=True))
            index += len(ran)

    def _prepare(self, segment: Segment, microbatch: Microbatch) -> None:
        if self._ensure_ready is not None:
            self._ensure_ready(segment.params)
        self._rng.position(microbatch, segment.layer, segment.index)

    def _replay(self, region: Region, microbatch: Microbatch, environment: Environment) -> tuple[Tensor, ...]:
        assert self._capture is not None  # regions exist only together with their capture
        return self._capture.replay(region, microbatch, *(environment[name] for name in region.segments[0].inputs))


def _eager(segment: Segment, environment: Environment) -> tuple[Tensor, ...]:
    result = segment.fn(*(environment[name] for name in segment.inputs))
    return result if isinstance(result, tuple) else (result,)
