"""The suite of kind graph-capture replays what is captured, and notices a replay that differs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_run.actions import Action
from megatron_run.contracts import BuildContext, GraphCapture, Microbatch, Region, Segment
from megatron_run.testing.graph_capture import graph_capture_checks
from tests.support.conformance import failures


class Again(GraphCapture):
    """Captures nothing and calls each region's functions again: the simplest capture that is right."""

    spoil = 1.0

    def __init__(self, context: BuildContext) -> None:
        self.context, self.replayed = context, 0

    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        return [
            Region(chunk, (segment,))
            for chunk, segments in enumerate(chunks)
            for segment in segments
            if segment.name == "attn"
        ]

    def capture(self, regions: Sequence[Region], actions: Sequence[Action]) -> None:
        assert regions
        assert actions

    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.replayed += 1
        result = region.segments[0].fn(*tensors) * self.spoil
        return result if isinstance(result, tuple) else (result,)

    def invalidate(self, reason: str) -> None:
        self.replayed = 0


class Spoiled(Again):
    spoil = 1.001


def test_captured_regions_are_replayed_and_give_eager_results() -> None:
    made: list[Again] = []

    def make(context: BuildContext) -> Again:
        made.append(Again(context))
        return made[-1]

    assert failures(graph_capture_checks(make)) == {}
    assert max(capture.replayed for capture in made) == 2 * 3 * 3  # two layers, three microbatches, three steps


def test_a_replay_that_differs_is_rejected_with_the_step() -> None:
    assert "step 2: losses are" in " ".join(failures(graph_capture_checks(Spoiled)).values())
