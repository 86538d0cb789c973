"""What cannot be captured is refused by name, in forward and in backward, and leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.contracts import Segment
from megatron_run.contracts.schedule import Action
from megatron_run.errors import GraphCaptureError
from megatron_run_engine.capture import Rules
from megatron_run_engine.capture.graphs.arena import Arena
from megatron_run_engine.capture.graphs.tape import out_form
from megatron_run_graph_capture_partial.recording import Recording
from megatron_run_testing.build_contexts import single_process_context
from tests.plugins.graph_bench import Pipeline, one_region, partial_capture

Violation = Callable[[Tensor], Any]


def drop_and_checkpoint(x: Tensor) -> Tensor:
    again: Tensor = checkpoint(lambda v: F.dropout(v * 2, 0.5), x, use_reentrant=False)
    return again


VIOLATIONS: dict[str, tuple[Violation, str]] = {
    "item": (lambda x: x.sum().item(), r"Tensor\.item\(\)"),
    "float": (lambda x: float(x.sum()), r"Tensor\.__float__\(\)"),
    "cpu": (lambda x: x.cpu(), r"Tensor\.cpu\(\)"),
    "tolist": (lambda x: x.tolist(), r"Tensor\.tolist\(\)"),
    "numpy": (lambda x: x.detach().numpy(), r"Tensor\.numpy\(\)"),
    "truth value": (lambda x: bool(x.sum() > 0), r"Tensor\.__bool__\(\)"),
    "print": (str, r"Tensor\.__repr__\(\)"),
    "nonzero": (lambda x: x.nonzero(), r"aten\.nonzero"),
    "boolean index": (lambda x: x[x > 0], r"aten\.index\.Tensor"),
    "boolean write": (lambda x: x.detach().clone().index_put_((x > 0,), x.detach().sum()), r"aten\.index_put_"),
    "masked_select": (lambda x: x.masked_select(x > 0), r"aten\.masked_select"),
    "unique": (lambda x: x.detach().unique(), r"aten\._unique2"),
    "repeat_interleave": (lambda x: x.repeat_interleave(torch.arange(4), 0), r"aten\.repeat_interleave"),
    "equal": (lambda x: torch.equal(x, x), r"aten\.equal"),
    "host upload": (lambda x: x + torch.tensor([1.0] * 4), r"torch\.tensor\(\)"),
    "reseeding": (lambda x: torch.manual_seed(1), "seeds or restores a random stream"),
}
"""Bar 9; one more is a checkpoint with dropout, which breaks its rule in the backward by itself."""


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, violation: Violation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.violation = violation
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.violation(*ctx.saved_tensors)
        return grads[0] * 2, None


def given() -> Tensor:
    return torch.ones(4, 4, requires_grad=True)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_refused_with_segment_and_operation(name: str, where: str) -> None:
    violation, operation = VIOLATIONS[name]

    def layer(x: Tensor) -> Tensor:
        if where == "forward":
            violation(x)
            return x * 2
        result: Tensor = _InBackward.apply(x, violation)  # type: ignore[no-untyped-call]  # torch's
        return result

    stream = torch.get_rng_state()
    with pytest.raises(
        GraphCaptureError, match=f"segment attn of layer 3 cannot be captured: its {where} .*{operation}"
    ):
        one_region(layer, [given()])
    assert torch.equal(stream, torch.get_rng_state())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_stream_that_is_moved_after_the_last_operation_is_refused(where: str) -> None:
    """No later operation finds it: a replay would leave the stream elsewhere than the eager layer does."""

    class Reseeding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            result = x * 2
            if where == "forward":
                torch.manual_seed(1)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            result = grads[0] * 2
            torch.manual_seed(1)
            return result

    stream = torch.get_rng_state()
    with pytest.raises(GraphCaptureError, match=f"its {where} seeds or restores a random stream"):
        one_region(Reseeding.apply, [given()])
    assert torch.equal(stream, torch.get_rng_state())


def test_a_checkpoint_that_draws_is_refused_in_the_backward() -> None:
    with pytest.raises(GraphCaptureError, match=r"segment attn of layer 3 .* its backward seeds or restores"):
        one_region(drop_and_checkpoint, [given()])


@pytest.mark.parametrize(
    "allowed",
    [
        lambda x: x[torch.arange(2)],
        lambda x: x.repeat_interleave(torch.full((4,), 2), 0, output_size=8),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: F.dropout(x, 0.5),
        lambda x: x.to(device=x.device) + torch.arange(4),
    ],
)
def test_what_looks_like_a_violation_and_is_none_is_captured(allowed: Violation) -> None:
    one_region(allowed, [given()])


def test_a_value_that_is_no_tensor_cannot_cross() -> None:
    with pytest.raises(GraphCaptureError, match="it returns a value of type int, and declares 1: out"):
        one_region(lambda x: x.shape[0], [given()])


def test_what_draws_unsaid_beside_others_is_refused() -> None:
    context = single_process_context(dtype=torch.float32)
    capture = partial_capture(context, scope=("a", "b"))
    double, drop = (
        Segment("a", 0, 0, lambda x: x * 2, ("x",), ("x",), ()),
        Segment("b", 0, 1, F.dropout, ("x",), ("x",), ()),
    )
    (region,) = capture.regions([[double, drop]])
    with pytest.raises(GraphCaptureError, match="segment b of layer 0 draws random numbers and does not say so"):
        capture.capture([region], [], {region: (torch.empty(2, 2, device="meta"),)})


def test_a_failed_capture_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bar 12: what was recorded before the failure is gone too."""
    arenas, made, make = WeakSet[Arena](), list[bool](), Arena.__init__

    def noted(arena: Arena) -> None:
        make(arena)
        arenas.add(arena)
        made.append(True)

    monkeypatch.setattr(Arena, "__init__", noted)
    stream, seen = torch.get_rng_state(), torch.zeros(4, 4)
    calls = []

    def layer(x: Tensor) -> Tensor:
        calls.append(seen.add_(x.detach() + 1))
        if len(calls) == 3:  # the second time it is recorded; the rules were tried before
            raise RuntimeError("out of luck")
        return F.dropout(x, 0.5)

    context = single_process_context(dtype=torch.float32)
    capture = partial_capture(context, scope=("attn",))
    (region,) = capture.regions([[Segment("attn", 0, 0, layer, ("x",), ("x",), (), draws=True)]])
    actions = [Action(op, m, 0) for op in ("F", "B") for m in range(2)]
    example = torch.empty(4, 4, device="meta", requires_grad=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        capture.capture([region], actions, {region: (example,)})
    assert len(calls) == 3
    assert not seen.any()
    assert torch.equal(stream, torch.get_rng_state())
    assert capture.mismatch(actions) == "nothing is captured"
    assert gc.isenabled()
    gc.collect()
    assert made
    assert not arenas
    with Rules(()):
        pass  # no mode was left switched on


def test_training_goes_on_after_a_failed_capture_as_if_none_had_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bar 12: eager steps keep their bits, and another capture may follow."""
    eager, captured = (Pipeline(Sequential(), 2) for _ in range(2))
    eager.step(1), captured.step(1)
    recorded, record_backward = [], Recording._record_backward

    def fails_late(self: Recording, *args: Any) -> list[Tensor | None]:
        recorded.append(record_backward(self, *args))
        if len(recorded) == 3:
            raise RuntimeError("out of luck")
        return recorded[-1]

    with monkeypatch.context() as broken:
        broken.setattr(Recording, "_record_backward", fails_late)
        with pytest.raises(RuntimeError, match="out of luck"):
            captured.start_capture()
    assert eager.step(2).equals(captured.step(2))
    arrivals = [list(each.stages[0].context.gradients._arrivals.values()) for each in (eager, captured)]
    assert arrivals[0] == arrivals[1], "the ledger hears of every gradient again"
    captured.start_capture()
    assert eager.step(3).equals(captured.step(3))


def test_operations_write_to_their_places_where_there_is_such_a_form() -> None:
    aten = torch.ops.aten
    assert out_form(aten.mm.default) == (aten.mm.out, ("out",))
    assert out_form(aten.native_layer_norm.default) == (aten.native_layer_norm.out, ("out0", "out1", "out2"))
    assert out_form(aten.detach.default) is None
