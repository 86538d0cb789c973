from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run.contracts import CaptureSize, GraphCapture, Microbatch, Region, Segment
from megatron_run.errors import GraphCaptureError
from megatron_run_engine.runtime.rng import RandomStreams
from megatron_run_engine.runtime.segments import SegmentRunner


def segment(
    name: str, fn: Any, inputs: str, outputs: str, index: int = 0, params: tuple[Parameter, ...] = ()
) -> Segment:
    return Segment(name, 0, index, fn, tuple(inputs.split()), tuple(outputs.split()), params)


def runner() -> SegmentRunner:
    return SegmentRunner(RandomStreams(1, torch.device("cpu")))


def test_segments_read_and_write_the_environment_in_order() -> None:
    segments = [
        segment("double", lambda x: x * 2, "x", "y"),
        segment("both", lambda x, y: (x + y, y - x), "x y", "x z", index=1),
    ]
    environment = {"x": torch.tensor(3.0)}
    runner().run(segments, Microbatch(0, 1, 0, {}), environment)
    assert {name: value.item() for name, value in environment.items()} == {"x": 9.0, "y": 6.0, "z": 3.0}


def test_parameters_are_made_ready_before_each_segment_that_reads_them() -> None:
    parameter, ready = Parameter(torch.zeros(1)), list[str]()

    def ensure(parameters: Iterable[Parameter]) -> None:
        for each in parameters:
            each.data.add_(1)
            ready.append("ready")

    run = runner()
    run.read_parameters_after(ensure)
    environment = {"x": torch.tensor([1.0])}
    run.run(
        [segment("a", lambda x: x + parameter, "x", "x", params=(parameter,))], Microbatch(0, 1, 0, {}), environment
    )
    assert ready == ["ready"]
    assert environment["x"].item() == 2.0


def test_a_frozen_segment_that_is_recomputed_with_a_trained_one_gives_back_what_it_reads() -> None:
    frozen, learned = Parameter(torch.ones(1), requires_grad=False), Parameter(torch.ones(1))
    taken = set[Parameter]()
    run = runner()
    run.read_parameters_after(taken.update, taken.difference_update)
    recomputed = [
        replace(segment(name, lambda x, p=p: x * p, "x", "x", index, (p,)), recompute=True)
        for index, (name, p) in enumerate({"a": frozen, "b": learned}.items())
    ]
    environment = {"x": torch.ones(1)}
    run.run(recomputed, Microbatch(0, 1, 0, {}), environment)
    assert taken == set()
    environment["x"].sum().backward()
    assert learned.grad is not None
    assert taken == set()


def test_what_follows_from_a_parameter_is_made_once_it_is_ready_and_before_eager_runs_and_replays() -> None:
    parameter, events = Parameter(torch.zeros(1)), list[str]()
    run, capture = runner(), Fused()
    run.read_parameters_after(lambda _: events.append("ready"))
    run.before_reading(parameter, lambda: events.append("made"))

    def read(x: Tensor) -> Tensor:
        events.append("read")
        return x

    reading = [segment("a", read, "x", "x", params=(parameter,)), segment("b", read, "x", "x", index=1)]
    run.run(reading, Microbatch(0, 1, 0, {}), {"x": torch.zeros(1)})
    assert events == ["ready", "made", "read", "ready", "read"]
    events.clear()
    run.watch(capture.regions([reading]))
    run.replay_with(capture)
    run.run(reading, Microbatch(0, 1, 0, {}), {"x": torch.zeros(1)})
    assert events == ["ready", "made", "ready"]


def test_the_random_stream_depends_on_the_segment_and_not_on_what_ran_before() -> None:
    draws: list[Tensor] = []

    def noise(x: Tensor) -> Tensor:
        draws.append(torch.rand(2))
        return x

    noisy = [segment("a", noise, "x", "x", index=0), segment("b", noise, "x", "x", index=1)]
    for part in (noisy, noisy[1:]):
        runner().run(part, Microbatch(0, 1, 0, {}), {"x": torch.zeros(1)})
    first, second, again = draws
    assert not torch.equal(first, second)
    assert torch.equal(second, again)


class Fused(GraphCapture):
    """Replays a region of two segments as one function."""

    def regions(self, chunks: Any) -> list[Region]:
        return [Region(0, tuple(chunks[0][:2]), ("x",), ("x",))]

    def plan(self, regions: Any, actions: Any) -> CaptureSize:
        return CaptureSize(len(regions), 0, 0)

    def capture(self, regions: Any, actions: Any, examples: Any) -> CaptureSize:
        return self.plan(regions, actions)

    def mismatch(self, actions: Any) -> str:
        return ""

    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (tensors[0] * 100,)

    def invalidate(self, reason: str) -> None:
        assert reason


def test_a_region_replays_its_segments_as_one_in_training_only() -> None:
    segments = [segment(name, lambda x: x + 1, "x", "x", index=i) for i, name in enumerate("abc")]
    run, capture = runner(), Fused()
    run.watch(capture.regions([segments]))
    run.replay_with(capture)
    results = {}
    for train in (True, False):
        environment = {"x": torch.tensor(1.0)}
        run.run(segments, Microbatch(0, 1, 0, {}, train=train), environment)
        results[train] = environment["x"].item()
    assert results == {True: 101.0, False: 4.0}


def test_what_a_watched_region_is_given_in_training_is_kept_without_values() -> None:
    segments = [segment(name, lambda x: x + 1, "x", "x", index=i) for i, name in enumerate("abc")]
    run, (region,) = runner(), Fused().regions([segments])
    run.watch([region])
    given = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    run.run(segments, Microbatch(0, 1, 0, {}, train=False), {"x": given})
    assert not run.examples
    run.run(segments, Microbatch(0, 1, 0, {}), {"x": given})
    (example,) = run.examples[region]
    assert (example.device.type, example.shape, example.dtype) == ("meta", given.shape, given.dtype)
    assert example.requires_grad


def test_streams_are_positioned_for_the_segment_that_draws_and_left_where_the_last_one_would() -> None:
    streams = RandomStreams(1, torch.device("cpu"))
    run, capture, seen = SegmentRunner(streams), Fused(), list[Tensor]()
    segments = [segment(name, lambda x: x + 1, "x", "x", index=i) for i, name in enumerate("ab")]
    segments[0] = replace(segments[0], draws=True)

    def look(region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        seen.append(streams.sharded.get_state())
        return tensors

    run.watch(capture.regions([segments]))
    run.replay_with(capture)
    capture.replay = look  # type: ignore[method-assign]
    run.run(segments, Microbatch(0, 1, 0, {}), {"x": torch.zeros(1)})
    seen.append(streams.sharded.get_state())
    for index in (0, 1):
        streams.position(Microbatch(0, 1, 0, {}), 0, index)
        assert torch.equal(seen[index], streams.sharded.get_state())


@pytest.mark.parametrize(
    ("returned", "said"), [(torch.zeros(1), "a Tensor"), ((), "a tuple of 0"), ((torch.zeros(1),) * 2, "a tuple of 2")]
)
def test_a_replay_that_does_not_return_the_regions_outputs_is_refused_in_one_line(returned: Any, said: str) -> None:
    segments = [segment(name, lambda x: x + 1, "x", "x", index=i) for i, name in enumerate("ab")]
    run, capture = runner(), Fused()
    run.watch(capture.regions([segments]))
    run.replay_with(capture, "graph-capture=mine")
    capture.replay = lambda *_: returned  # type: ignore[method-assign]
    with pytest.raises(GraphCaptureError) as refused:
        run.run(segments, Microbatch(0, 1, 0, {}), {"x": torch.zeros(1)})
    assert str(refused.value) == (
        f"graph-capture=mine replayed a+b of layer 0 and returned {said}: replay returns a tuple of 1, the region's "
        "outputs: x; correct its replay, or choose --plugin graph-capture=none"
    )
