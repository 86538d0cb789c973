"""Random streams of a GPU within a capture: a kernel may advance one past the dispatcher, nobody may set one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import Segment
from megatron_run.contracts.schedule import Action
from megatron_run.errors import GraphCaptureError
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.build_contexts import single_process_context
from tests.plugins.engine.philox import STREAM, draw_from_gpu
from tests.plugins.graph_bench import partial_capture


class _Twice(torch.autograd.Function):
    """Calls ``forward`` between two operations of its forward, and ``backward`` between two of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[], Any], backward: Callable[[], Any]) -> Tensor:
        ctx.call = backward
        half = x * 1
        forward()
        return half * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        half = grads[0] * 1
        ctx.call()
        return half * 2, None, None


def capture(where: str, moves: Callable[[], Any], context: BuildContext) -> None:
    """Capture a layer, of two segments without dropout, that calls ``moves`` in its pass ``where``."""

    def nothing() -> None:
        """Move nothing."""

    calls = (moves, nothing) if where == "forward" else (nothing, moves)
    attn = Segment("attn", 0, 0, lambda x: _Twice.apply(x, *calls), ("x",), ("x",), ())  # type: ignore[no-untyped-call]  # torch's
    mlp = Segment("mlp", 0, 1, torch.tanh, ("x",), ("x",), ())
    made = partial_capture(context)
    (region,) = made.regions([[attn, mlp]])
    example = torch.empty(4, device="meta", requires_grad=True)
    made.capture([region], [Action("F", 0, 0), Action("B", 0, 0)], {region: (example,)})


@pytest.fixture
def gpu() -> BuildContext:
    context = single_process_context(dtype=torch.float32)
    draw_from_gpu(context)
    STREAM.manual_seed(7).set_offset(64)
    return context


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_kernel_may_advance_a_stream_past_the_dispatcher(where: str, gpu: BuildContext) -> None:
    """Whether it draws or not: a graph counts how far a registered stream was advanced."""
    state = STREAM.get_state()
    capture(where, STREAM.advance, gpu)
    assert torch.equal(STREAM.get_state(), state), "a capture leaves it where it was"


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "moves",
    [
        lambda: STREAM.manual_seed(8),
        lambda: STREAM.manual_seed(8).set_offset(64),
        lambda: STREAM.manual_seed(7),
        lambda: STREAM.set_offset(60),
    ],
    ids=["seeded", "seeded, with an offset", "seeded again", "restored"],
)
def test_nobody_may_seed_or_restore_one(where: str, moves: Callable[[], Any], gpu: BuildContext) -> None:
    state = STREAM.get_state()
    with pytest.raises(GraphCaptureError, match=f"its {where} seeds or restores a random stream"):
        capture(where, moves, gpu)
    assert torch.equal(STREAM.get_state(), state)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_stream_of_a_cpu_is_advanced_by_operations_alone(where: str) -> None:
    """A tape replays nothing else, and the state does not tell whether it went on or back."""
    ahead = torch.Generator()
    ahead.set_state(torch.get_rng_state())
    torch.rand(4, generator=ahead)
    with pytest.raises(GraphCaptureError, match=f"its {where} seeds or restores a random stream"):
        capture(where, lambda: torch.set_rng_state(ahead.get_state()), single_process_context(dtype=torch.float32))
