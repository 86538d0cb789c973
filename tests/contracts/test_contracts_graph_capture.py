from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from megatron_run.actions import Action
from megatron_run.contracts import BuildContext, GraphCapture, Microbatch, Region, Segment
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.testing.check import Check, CheckFailed
from megatron_run.testing.graph_capture import graph_capture_checks

NAMES = [entry.name for entry in scan().entries if entry.kind == "graph-capture"]


def checks(name: str) -> tuple[Check, ...]:
    def make(context: BuildContext) -> GraphCapture:
        made: GraphCapture = load(choose(scan(), "graph-capture", name, "test"), "test").create(context=context)
        return made

    return graph_capture_checks(make)


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", range(3))
def test_every_installed_capture_keeps_the_contract(name: str, index: int) -> None:
    checks(name)[index].run()


def test_captured_regions_are_replayed_and_give_eager_results() -> None:
    made: list[Again] = []

    def make(context: BuildContext) -> Again:
        made.append(Again(context))
        return made[-1]

    for check in graph_capture_checks(make):
        check.run()
    assert max(capture.replayed for capture in made) == 2 * 3 * 3  # two layers, three microbatches, three steps


def test_a_replay_that_differs_is_rejected_with_the_step() -> None:
    with pytest.raises(CheckFailed, match="step 2: losses are"):
        graph_capture_checks(Spoiled)[1].run()
