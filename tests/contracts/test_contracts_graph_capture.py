"""The suite of kind graph-capture replays what is captured, and notices a replay that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run.contracts import CaptureSize, GraphCapture, Microbatch, Region, Segment
from megatron_run.contracts.schedule import Action
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.graph_capture import graph_capture_checks
from tests.contracts.conformance import failures


class Again(GraphCapture):
    """Captures nothing and calls each region's functions again: the simplest capture that is right."""

    spoil = 1.0
    planned_graphs = 0

    def __init__(self, context: BuildContext) -> None:
        self.context, self.replayed = context, 0

    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        return [
            Region(chunk, (segment,), segment.inputs, segment.outputs)
            for chunk, segments in enumerate(chunks)
            for segment in segments
            if segment.name == "attn"
        ]

    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        return CaptureSize(len(regions), graphs=self.planned_graphs, slots=0)

    def capture(
        self, regions: Sequence[Region], actions: Sequence[Action], examples: Mapping[Region, tuple[Tensor, ...]]
    ) -> CaptureSize:
        assert regions
        assert actions
        assert {region: [tensor.device.type for tensor in given] for region, given in examples.items()} == {
            region: ["meta"] for region in regions
        }
        return CaptureSize(len(regions), graphs=0, slots=0)

    def mismatch(self, actions: Sequence[Action]) -> str:
        return ""

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


def test_bits_are_those_of_deterministic_kernels() -> None:
    """Some kernels of a GPU add in any order unless told otherwise."""
    asked, before = list[bool](), torch.are_deterministic_algorithms_enabled()

    class Asking(Again):
        def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
            asked.append(torch.are_deterministic_algorithms_enabled())
            return super().replay(region, microbatch, *tensors)

    assert failures(graph_capture_checks(Asking)) == {}
    assert asked
    assert all(asked)
    assert torch.are_deterministic_algorithms_enabled() == before


def test_a_replay_that_differs_is_rejected_with_the_step() -> None:
    assert "step 2: losses are" in " ".join(failures(graph_capture_checks(Spoiled)).values())


def test_a_plugin_that_cannot_say_where_it_works_fails() -> None:
    def broken() -> str:
        raise ZeroDivisionError

    (_, *captured) = graph_capture_checks(Again, broken)
    for check in captured:
        with pytest.raises(ZeroDivisionError):
            check.run()


class Boaster(Again):
    planned_graphs = 12


def test_a_capture_that_is_not_as_planned_is_rejected() -> None:
    assert "planned 2 regions, 12 graphs" in " ".join(failures(graph_capture_checks(Boaster)).values())


class Stale(Again):
    """Replays with the values that parameters had when it captured, as constants in a graph would be."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.values: dict[Parameter, Tensor] = {}

    def capture(
        self, regions: Sequence[Region], actions: Sequence[Action], examples: Mapping[Region, tuple[Tensor, ...]]
    ) -> CaptureSize:
        parameters = [parameter for region in regions for parameter in region.segments[0].params]
        self.values = {parameter: parameter.detach().clone() for parameter in parameters}
        return super().capture(regions, actions, examples)

    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        live = {parameter: parameter.detach().clone() for parameter in region.segments[0].params}
        for parameter in live:
            parameter.data.copy_(self.values[parameter])
        result = super().replay(region, microbatch, *tensors)
        for parameter, value in live.items():
            parameter.data.copy_(value)
        return result


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor) -> Tensor:
        slot.copy_(x)
        return slot.data  # without the slot's version, by which autograd would notice that it is overwritten

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class OneSlot(Again):
    """Copies the inputs of every microbatch to one place, from where a backward reads those of the last."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.slots: dict[Region, list[Tensor]] = {}

    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        slots = self.slots.setdefault(region, [torch.empty_like(tensor) for tensor in tensors])
        copied: list[Any] = [_Into.apply(*pair) for pair in zip(tensors, slots, strict=True)]  # type: ignore[no-untyped-call]  # torch's
        return super().replay(region, microbatch, *copied)


def test_a_replay_with_the_parameters_of_the_capture_is_rejected() -> None:
    assert "step 3: losses are" in " ".join(failures(graph_capture_checks(Stale)).values())


def test_one_slot_for_all_microbatches_in_flight_is_rejected() -> None:
    (name,) = found = failures(graph_capture_checks(OneSlot))
    assert name == "microbatches in flight in two chunks keep apart what they captured"
    assert "step 2: the gradient of " in found[name]
