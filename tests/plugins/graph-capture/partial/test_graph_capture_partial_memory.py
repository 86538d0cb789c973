"""What graphs hold, and what goes wrong when their memory is shared in another way: the tape must show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

from megatron_run.contracts import Microbatch, Segment
from megatron_run.contracts.schedule import Action
from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.capture import OrderGuard, Pass
from megatron_run_engine.capture.graphs import weak_alias
from megatron_run_engine.capture.graphs.arena import ALIGNMENT, Arena
from megatron_run_graph_capture_partial import capture as capturing
from megatron_run_graph_capture_partial.capture import Reuse, per_microbatch, per_slot
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_interleaved import Interleaved
from megatron_run_testing.build_contexts import single_process_context
from tests.plugins.graph_bench import Pipeline, one_region, partial_capture

STAGES = 3
FIRST_STAGE = GptOptions(num_layers=STAGES, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.0)


def piped(microbatches: int, **options: Any) -> Pipeline:
    """Stages of one layer under 1F1B, after their first step."""
    pipeline = Pipeline(OneForwardOneBackward(), microbatches, stages=STAGES, model=FIRST_STAGE, **options)
    pipeline.step(1)
    return pipeline


def gradients_are_eager(pipeline: Pipeline, microbatches: int) -> bool:
    eager = piped(microbatches)
    return pipeline.step(2).equals(eager.step(2))


def test_memory_grows_with_microbatches_in_flight_and_not_with_their_number() -> None:
    """Bar 7: the pool's peak at M = 4P is at most 1.15 of that at M = P; static inputs are the same."""
    few, many = (piped(microbatches).start_capture() for microbatches in (STAGES, 4 * STAGES))
    for one, other in zip(few, many, strict=True):
        assert one.pool_bytes is not None
        assert other.pool_bytes is not None
        assert other.pool_bytes <= 1.15 * one.pool_bytes
        assert (one.slots, one.static_bytes) == (other.slots, other.static_bytes)
        # Of the last stage every microbatch is a round.
        assert other.graphs == (4 * one.graphs if one.slots > 1 else one.graphs) == 2 * (4 * STAGES) ** (one.slots > 1)


def test_graphs_by_slot_are_as_few_as_can_be_and_exact() -> None:
    """Bar 8: 2 * sum(layers * peak) graphs, and the bits of eager steps."""
    pipeline = piped(2 * STAGES, graph_reuse="per_slot")
    sizes = pipeline.start_capture()
    assert [size.graphs for size in sizes] == [2 * min(STAGES - stage, 2 * STAGES) for stage in range(STAGES)]
    assert [size.slots for size in sizes] == list(pipeline.plan.peak_in_flight)
    assert gradients_are_eager(pipeline, 2 * STAGES)


def test_graphs_by_slot_follow_the_peak_of_each_chunk() -> None:
    """Bar 8 with two chunks of two layers: their peaks differ, and a pool of each chunk and slot stays exact."""
    model = FIRST_STAGE.model_copy(update={"num_layers": 8})
    eager, captured = (
        Pipeline(Interleaved(), 4, stages=2, chunks=2, model=model, scope=("attn",), graph_reuse="per_slot")
        for _ in range(2)
    )
    eager.step(1), captured.step(1)
    sizes = captured.start_capture()
    peaks = [[peak(captured.actions(stage), chunk) for chunk in range(2)] for stage in range(2)]
    assert len({*peaks[0]}) == 2
    assert [size.graphs for size in sizes] == [2 * sum(2 * each for each in found) for found in peaks]
    assert captured.step(2).equals(eager.step(2))


def peak(actions: Sequence[Action], chunk: int) -> int:
    """The most microbatches that ``chunk`` has in flight, counted action by action."""
    changes = ({"F": 1, "B": -1}[op] for op, _, other in actions if other == chunk and op in "FB")
    return max(accumulate(changes))


def first_microbatch_for_all(order: tuple[Pass, ...], chunks: int) -> Reuse:
    """Every microbatch replays the graphs of the first."""
    reuse = per_microbatch(order, chunks)
    return reuse._replace(copies=dict.fromkeys(reuse.copies, 0))


def one_pool_for_all_slots(order: tuple[Pass, ...], chunks: int) -> Reuse:
    """Graphs by slot in one pool, recorded one after the other: each slot is given the memory of the one before."""
    reuse = per_slot(order, chunks)
    return reuse._replace(pools=dict.fromkeys(reuse.pools, 0))


@pytest.mark.parametrize("wrong", [first_microbatch_for_all, one_pool_for_all_slots])
def test_wrong_sharing_gives_wrong_gradients(
    wrong: Callable[[tuple[Pass, ...], int], Reuse], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bar 6, negative controls: where these give right gradients, the tape is no model of a CUDA graph any more."""
    pipeline = piped(2 * STAGES, graph_reuse="per_slot")
    monkeypatch.setattr(capturing, "per_slot", wrong)
    monkeypatch.setattr(OrderGuard, "check", lambda *_: None)
    pipeline.start_capture()
    assert not gradients_are_eager(pipeline, 2 * STAGES)


def test_a_block_is_given_to_others_once_its_storage_is_gone_and_a_weak_alias_keeps_nothing() -> None:
    arena, like = Arena(), torch.empty(100)
    first = arena.like(like)
    place, alias = first.data_ptr(), weak_alias(first)
    second = arena.like(like)
    assert second.data_ptr() != place
    assert second.data_ptr() % ALIGNMENT == 0
    view = first[10:]
    del first
    assert arena.like(like).data_ptr() != place, "a view keeps its storage"
    del view
    third = arena.like(like)
    assert third.data_ptr() == place == alias.data_ptr()
    assert arena.held == 2 * 448  # 400 bytes, rounded up
    assert arena.peak == 3 * 448


def test_neighbouring_free_blocks_are_joined() -> None:
    arena = Arena()
    small = [arena.like(torch.empty(16)) for _ in range(3)]
    start = small[0].data_ptr()
    del small[1], small[1], small[0]
    assert arena.like(torch.empty(48)).data_ptr() == start
    assert arena.like(torch.empty(2**20)).shape == (2**20,), "what is larger than a segment has one of its own"


def test_strides_are_kept() -> None:
    transposed = torch.empty(3, 5).t()
    assert Arena().like(transposed).stride() == transposed.stride()


def test_what_leaves_a_chunk_is_a_copy() -> None:
    """A message may still read the output, or the input's gradient, when the graph's memory is used again."""
    x = torch.randn(2, 4, requires_grad=True)
    capture, region, _ = one_region(lambda v: v.tanh() * v, [x])
    (out,) = capture.replay(region, Microbatch(0, 1, 0, {}), x)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    sent = [(each, each.detach().clone()) for each in (out, gradient)]
    (again,) = capture.replay(region, Microbatch(0, 2, 0, {}), (x + 1).detach().requires_grad_())
    again.sum().backward()
    assert all(torch.equal(each, before) for each, before in sent)


def test_what_eager_layers_put_off_to_w_is_kept_until_then() -> None:
    """Between two regions an eager segment may read the first one's output as late as W, and the other's gradient."""
    context = single_process_context(dtype=torch.float32)
    capture = partial_capture(context, scope=("a", "b"))
    segments = [
        Segment(name, 0, place, lambda v: v.tanh() * v, ("x",), ("x",), ())
        for place, name in enumerate(("a", "e", "b"))
    ]
    first, last = capture.regions([segments])
    x = torch.randn(64, 64, requires_grad=True)
    example = (torch.empty(64, 64, device="meta", requires_grad=True),)
    actions = [Action.parse(text) for text in ["F0.0", "I0.0", "F1.0", "W0.0", "I1.0", "W1.0"]]
    capture.capture([first, last], actions, {first: example, last: example})

    def forward(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        (middle,) = capture.replay(first, Microbatch(index, 1, index, {}), x * (index + 1))
        (out,) = capture.replay(last, Microbatch(index, 1, index, {}), middle * 2)
        return middle, out

    middle, out = forward(0)
    put_off = middle.detach().clone()
    out.sum().backward()
    forward(1)
    assert torch.equal(middle, put_off)
