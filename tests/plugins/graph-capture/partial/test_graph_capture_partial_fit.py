"""What happens when something no longer fits what was captured: it is noticed before any replay."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.contracts import Microbatch, Region, Segment
from megatron_run.contracts.schedule import Action
from megatron_run.errors import GraphCaptureError
from megatron_run_engine.capture.graphs import Place
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_graph_capture_partial.region_graph import RegionGraph
from megatron_run_testing.build_contexts import single_process_context
from tests.plugins.graph_bench import SMALL, Pipeline, one_region, partial_capture

ONE = [Action("F", 0, 0), Action("B", 0, 0)]


def at(step: int, index: int = 0) -> Microbatch:
    return Microbatch(index, step, index, {})


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=False)


def test_another_order_than_the_captured_one_is_refused_before_a_replay() -> None:
    """Bar 3: nothing was written when it is noticed."""
    layer, x = linear(), torch.ones(2, 4, requires_grad=True)
    capture, region, _ = one_region(layer, [x], params=[layer.weight])
    (out,) = capture.replay(region, at(1), x)
    before = out.detach().clone()
    with pytest.raises(
        GraphCaptureError, match=r"forward of attn of layer 3 for microbatch 0 .* next was the backward"
    ):
        capture.replay(region, at(1), 2 * x)
    assert torch.equal(out, before)
    out.sum().backward()
    with pytest.raises(GraphCaptureError, match="recorded next was the forward"):
        out.sum().backward()


def test_another_order_of_a_pipeline_is_refused() -> None:
    pipeline = Pipeline(Sequential(), 2)
    pipeline.step(1)
    pipeline.start_capture()
    (actions,) = pipeline.plan.lists
    object.__setattr__(pipeline.plan, "order", ((0, 0), (0, 2), (0, 1), (0, 3)))  # both forwards first
    assert [str(actions[index]) for _, index in pipeline.plan.order] == ["F0.0", "F1.0", "B0.0", "B1.0"]
    with pytest.raises(GraphCaptureError, match="for microbatch 1 was about to be replayed out of order"):
        pipeline.step(2)


def test_a_chained_region_refuses_what_the_region_before_it_did_not_leave() -> None:
    left, region = torch.ones(3), cast("Any", "layer 1")
    graph = RegionGraph(region, cast("Any", None), (Place.static(left),), chained=True, first=False, last=False)
    graph.load([left.view_as(left)])
    with pytest.raises(GraphCaptureError, match=r"layer 1 was given something else.*chain=false"):
        graph.load([left.clone()])


def test_another_number_of_microbatches_does_not_fit() -> None:
    layer, x = linear(), torch.ones(2, 4)
    capture, _, _ = one_region(layer, [x], params=[layer.weight])
    assert not capture.mismatch(ONE)
    more = [Action(op, m, 0) for m in range(2) for op in ("F", "B")]
    assert capture.mismatch(more) == "a step of 2 microbatches follows steps of 1"


def test_a_parameter_that_was_moved_does_not_fit() -> None:
    layer, x = linear(), torch.ones(2, 4)
    capture, _, _ = one_region(layer, [x], params=[layer.weight])
    layer.weight.data = layer.weight.data.clone()
    assert capture.mismatch(ONE) == "1 parameters or their gradients were moved in memory"


def run(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Eager output and weight gradient of its sum."""
    out = layer(x)
    (gradient,) = torch.autograd.grad(out.sum(), layer.weight)
    return out.detach(), gradient


def test_another_shape_runs_eagerly_and_asks_for_another_capture() -> None:
    layer, x = linear(), torch.ones(2, 4, requires_grad=True)
    capture, region, _ = one_region(layer, [x], params=[layer.weight])
    other = torch.randn(3, 4, requires_grad=True)
    expected, gradient = run(layer, other)
    (out,) = capture.replay(region, at(1), other)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert torch.equal(main_grad(layer.weight), gradient)
    assert "attn of layer 3 was given (3, 4) torch.float32 and was captured with (2, 4)" in capture.mismatch(ONE)
    (again,) = capture.replay(region, at(2), x)  # the graphs themselves are as good as before
    assert torch.equal(again, run(layer, x)[0])


def test_another_type_runs_eagerly_and_asks_for_another_capture() -> None:
    """Copied into the captured input it would be converted in silence."""
    x = torch.ones(2, 4, requires_grad=True)
    capture, region, _ = one_region(torch.tanh, [x])
    other = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    (out,) = capture.replay(region, at(1), other)
    assert out.dtype == torch.float64
    assert torch.equal(out, other.tanh())
    assert "given (2, 4) torch.float64 and was captured with (2, 4) torch.float32" in capture.mismatch(ONE)


def test_another_shape_is_an_error_under_strict() -> None:
    layer, x = linear(), torch.ones(2, 4)
    capture, region, _ = one_region(layer, [x], params=[layer.weight], strict=True)
    with pytest.raises(GraphCaptureError, match=r"no longer fits: attn of layer 3 was given \(3, 4\)"):
        capture.replay(region, at(1), torch.ones(3, 4))
    with pytest.raises(GraphCaptureError, match=r"no longer fits: a reason; leave graph-capture\.strict out"):
        capture.invalidate("a reason")


def test_a_layer_whose_inputs_have_no_gradient_still_trains() -> None:
    """Tokens: a parameter stands in for them in autograd's graph."""
    table, tokens = Parameter(torch.randn(5, 3)), torch.tensor([[1, 4]])
    capture, region, context = one_region(lambda ids: table[ids], [tokens], params=[table])
    arrived: list[Parameter] = []
    context.gradients.start_step(1, arrived.append)
    (out,) = capture.replay(region, at(1), torch.tensor([[0, 2]]))
    assert torch.equal(out, table[torch.tensor([[0, 2]])])
    out.sum().backward()
    assert main_grad(table).sum(1).tolist() == [3.0, 0.0, 3.0, 0.0, 0.0]
    assert context.gradients._arrivals == {table: 1}


def test_a_parameter_of_a_later_segment_stands_in_where_the_first_has_none() -> None:
    table = Parameter(torch.randn(5, 3))
    context = single_process_context(dtype=torch.float32)
    context.gradients.adopt(table, "weight")
    table.main_grad = torch.zeros_like(table)  # type: ignore[attr-defined]  # where the engine keeps it
    segments = (
        Segment("shift", 0, 0, lambda ids: ids + 1, ("tokens",), ("ids",), ()),
        Segment("look", 0, 1, lambda ids: table[ids], ("ids",), ("x",), (table,)),
    )
    capture = partial_capture(context, scope=("shift", "look"))
    (region,) = capture.regions([segments])
    capture.capture([region], ONE, {region: (torch.empty(1, dtype=torch.int64, device="meta"),)})
    (out,) = capture.replay(region, at(1), torch.tensor([2]))
    out.sum().backward()
    assert main_grad(table).sum(1).tolist() == [0.0, 0.0, 0.0, 3.0, 0.0]


def test_parameters_are_ready_before_every_replay_and_nobody_asks_while_capturing() -> None:
    """Bar 13."""
    together = SMALL.model_copy(update={"dropout": 0.0})  # then a region has the segments of a whole layer
    pipeline, log = Pipeline(Sequential(), 2, model=together), list[object]()
    (stage,) = pipeline.stages
    assert {len(region.segments) for region in stage.regions} == {2}
    stage.context.segments.read_parameters_after(lambda parameters: log.append(tuple(parameters)))
    pipeline.step(1)
    log.clear()
    pipeline.start_capture()
    assert not log
    replay = stage.capture.replay

    def logged(region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        log.append(region)
        return replay(region, microbatch, *tensors)

    stage.capture.replay = logged  # type: ignore[method-assign]
    pipeline.step(2)
    replays = [place for place, entry in enumerate(log) if isinstance(entry, Region)]
    assert len(replays) == 2 * len(stage.regions)
    for place in replays:
        region = log[place]
        assert isinstance(region, Region)
        parameters = [segment.params for segment in region.segments]
        assert [*map(id, log[place - len(parameters) : place])] == [*map(id, parameters)]
