"""The segment runner: before each segment it waits for parameters and positions random streams.

It replays captured segments from their graph, and decides what the others keep for their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_run.errors import GraphCaptureError
from megatron_run_engine.runtime.gates import gated, in_backward
from megatron_run_engine.runtime.recompute import Environment, recompute_names, run_recomputed

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import GraphCapture, Microbatch, Region, Segment
    from megatron_run_engine.runtime.offload import Offload
    from megatron_run_engine.runtime.rng import RandomStreams

#: What an optimizer does about parameters: ``ensure_ready`` or ``release``.
OfParameters = Callable[[Iterable["Parameter"]], None]


class SegmentRunner:
    """Runs segments, eagerly or from a captured graph.

    In both cases it first waits until the segment's parameters are ready (an optimizer may still be gathering them) and
    positions the random streams. That also happens when segments are recomputed in the backward, so the recomputation
    draws the same masks. ``offload`` moves what segments save to the host; None: everything stays.
    """

    def __init__(self, rng: RandomStreams, offload: Offload | None = None) -> None:
        self._rng, self._offload = rng, offload
        self._ensure_ready: OfParameters | None = None
        self._release: OfParameters | None = None
        self._preparing: dict[Parameter, Callable[[], None]] = {}
        self._capture: GraphCapture | None = None
        self._capture_name = ""
        self._regions: dict[int, Region] = {}
        self._examples: dict[Region, tuple[Tensor, ...]] = {}

    @property
    def examples(self) -> Mapping[Region, tuple[Tensor, ...]]:
        """The last inputs of each watched region in an eager step, as tensors without values on the meta device."""
        return self._examples

    def keep_on_device(self, tensors: Iterable[Tensor]) -> None:
        """Never offload ``tensors``, which live as long as the model."""
        if self._offload is not None:
            self._offload.keep(tensors)

    def read_parameters_after(self, ensure_ready: OfParameters, release: OfParameters | None = None) -> None:
        """From now on call ``ensure_ready`` with a segment's parameters before each run of it.

        With ``release``, that is called after the run, and both again around its backward.
        """
        self._ensure_ready, self._release = ensure_ready, release

    def before_reading(self, parameter: Parameter, prepare: Callable[[], None]) -> None:
        """From now on call ``prepare`` before each run of a segment with ``parameter``, once that is ready.

        It runs outside of the graphs of regions, but within that of a whole step.
        """
        self._preparing[parameter] = prepare

    def watch(self, regions: Sequence[Region]) -> None:
        """From now on record the inputs of ``regions`` when they run eagerly in training."""
        self._regions = {id(region.segments[0]): region for region in regions}
        self._examples.clear()

    def replay_with(self, capture: GraphCapture | None, name: str = "the graph capture") -> None:
        """From now on replay the watched regions by ``capture``, ``name`` in errors; None returns to eager runs."""
        self._capture, self._capture_name = capture, name

    def run(self, segments: Sequence[Segment], microbatch: Microbatch, environment: Environment) -> None:
        """Run a layer's ``segments`` in order, reading inputs from and writing outputs to ``environment``."""
        if microbatch.decoding is not None:  # there is nothing to capture, recompute or draw
            for segment in segments:
                self._make_ready(segment)
                decoding = {"decoding": microbatch.decoding} if segment.decodes else {}
                result = segment.fn(*(environment[name] for name in segment.inputs), **decoding)
                _store(segment, result, environment)
                if self._release is not None:
                    self._release(segment.params)
            return
        learns = microbatch.train and torch.is_grad_enabled()
        if self._offload is not None and learns and segments:
            self._offload.enter(microbatch, segments[0].layer)
        index = 0
        while index < len(segments):
            region = self._region_at(segments[index], microbatch)
            if region is not None and self._capture is not None:
                replay = partial(self._replay, self._capture, region, microbatch)
                if learns and self._capture.reruns and any(segment.recompute for segment in region.segments):
                    recompute_names(region.inputs, region.outputs, environment, replay)
                else:
                    replay(environment)
                index += len(region.segments)
                continue
            if region is not None:
                self._note_inputs(region, environment)
            together = self._alike(segments[index:]) if learns else segments[index : index + 1]
            with self._saving(together) if learns else nullcontext():
                if learns and together[0].recompute:
                    run_recomputed(together, environment, partial(self._run_eagerly, microbatch))
                else:
                    self._run_eagerly(microbatch, together[0], environment)
            index += len(together)

    def _region_at(self, segment: Segment, microbatch: Microbatch) -> Region | None:
        """The watched region that begins with ``segment``; none in evaluation."""
        return self._regions.get(id(segment)) if microbatch.train else None

    def _alike(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """The first of ``segments`` and, if it is recomputed, those after it that are recomputed with it."""
        first, count = segments[0], 1
        if first.recompute:
            while count < len(segments) and self._goes_with(first, segments[count]):
                count += 1
        return segments[:count]

    def _goes_with(self, first: Segment, other: Segment) -> bool:
        replayed = self._capture is not None and id(other) in self._regions
        return other.recompute and other.offload == first.offload and not replayed

    def _saving(self, segments: Sequence[Segment]) -> AbstractContextManager[None]:
        if self._offload is None or not segments[0].offload:
            return nullcontext()
        for segment in segments if self._release is not None else ():
            self._make_ready(segment)  # parameters, which stay, are known by the memory that they have
        return self._offload.saving(parameter for segment in segments for parameter in segment.params)

    def _run_eagerly(self, microbatch: Microbatch, segment: Segment, environment: Environment) -> None:
        region = self._region_at(segment, microbatch)
        if region is not None and environment.keys() >= {*region.inputs}:
            self._note_inputs(region, environment)  # it begins among segments that are recomputed together
        self._make_ready(segment)
        self._rng.position(microbatch, segment.layer, segment.index)
        run = segment.fn if self._release is None else partial(self._borrow, segment, self._release)
        _store(segment, run(*(environment[name] for name in segment.inputs)), environment)

    def _borrow(self, segment: Segment, release: OfParameters, *inputs: Tensor | None) -> object:
        """Run ``segment``, and ``release`` its parameters; in the backward they are made ready again."""
        give_back = partial(release, segment.params)
        if not torch.is_grad_enabled():
            result = segment.fn(*inputs)
        else:
            result = gated(segment.fn, inputs, partial(self._make_ready, segment), give_back)
        # What is recomputed in a backward is read until that has passed it, and at no other time if it has none.
        if not in_backward() or not _differentiable(result):
            give_back()
        return result

    def _note_inputs(self, region: Region, environment: Environment) -> None:
        self._examples[region] = tuple(without_values(environment[name]) for name in region.inputs)

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
        if self._preparing:
            for parameter in segment.params:
                if (prepare := self._preparing.get(parameter)) is not None:
                    prepare()


def _store(segment: Segment, result: object, environment: Environment) -> None:
    outputs = result if isinstance(result, tuple) else (result,)
    environment.update(zip(segment.outputs, outputs, strict=True))


def _differentiable(result: object) -> bool:
    outputs = result if isinstance(result, tuple) else (result,)
    return any(isinstance(each, Tensor) and each.requires_grad for each in outputs)


def without_values(x: Tensor) -> Tensor:
    """Return a tensor like ``x`` on the meta device."""
    # Not empty_like: for the meta device it first imports the compiler's symbolic shapes, which takes seconds.
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
