"""Runs the segments of layers: waits for their parameters, positions random streams, and replays graphs."""

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
    """Runs segments eagerly or by replaying a graph.

    In both cases it first waits for the segment's parameters, which an optimizer may still be gathering, and positions
    the random streams. This also happens when a checkpointed layer is recomputed in the backward.
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
        """The last eager inputs of each watched region, as tensors on the meta device."""
        return self._examples

    def read_parameters_after(self, ensure_ready: EnsureReady) -> None:
        """Call ``ensure_ready`` with a segment's parameters before each time it runs."""
        self._ensure_ready = ensure_ready

    def watch(self, regions: Sequence[Region]) -> None:
        """Record the inputs of ``regions`` from now on whenever they run eagerly in training."""
        self._regions = {id(region.segments[0]): region for region in regions}
        self._examples.clear()

    def replay_with(self, capture: GraphCapture | None, name: str = "the graph capture") -> None:
        """Run the watched regions through ``capture``, called ``name``, from now on; None runs them eagerly again."""
        self._capture, self._capture_name = capture, name

    def run(self, segments: Sequence[Segment], microbatch: Microbatch, environment: Environment) -> None:
        """Run a layer's ``segments`` in order. They read inputs from ``environment`` and write outputs to it."""
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
        self._rng.position(microbatch, region.drawing.layer, region.drawing.index)
        outputs = capture.replay(region, microbatch, *(environment[name] for name in region.inputs))
        if not isinstance(outputs, tuple) or len(outputs) != len(region.outputs):
            raise self._no_outputs(region, outputs)
        environment.update(zip(region.outputs, outputs, strict=True))
        if region.drawing is not last:
            self._rng.position(microbatch, last.layer, last.index)  # as an eager layer leaves them

    def _no_outputs(self, region: Region, returned: object) -> GraphCaptureError:
        said = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        return GraphCaptureError(
            f"{self._capture_name} replayed {region} and returned {said}",
            why=f"replay returns a tuple of {len(region.outputs)}, the region's outputs: {', '.join(region.outputs)}",
            fix="correct its replay, or choose --plugin graph-capture=none",
        )

    def _make_ready(self, segment: Segment) -> None:
        if self._ensure_ready is not None:
            self._ensure_ready(segment.params)


def _without_values(x: Tensor) -> Tensor:
    # empty_like on the meta device would import the compiler's symbolic shapes, which takes seconds.
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
