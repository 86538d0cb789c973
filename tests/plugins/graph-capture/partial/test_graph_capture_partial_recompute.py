"""Recomputed segments within graphs and beside them: equal bits, less memory."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_run.contracts import Schedule
from megatron_run_engine.builtin.model.gpt import ExpertOptions, GptOptions
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_zero_bubble.h1 import ZeroBubbleH1
from tests.plugins.graph_bench import Pipeline

MODEL = GptOptions(num_layers=4, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1)
STILL = MODEL.model_copy(update={"dropout": 0.0})
EXPERTS = GptOptions(
    num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1, experts=ExpertOptions(count=4)
)


@pytest.mark.parametrize(
    ("scope", "train", "model", "schedule", "reuse"),
    [
        pytest.param(
            ("attn",),
            {"recompute": "full"},
            MODEL,
            OneForwardOneBackward(),
            "per_microbatch",
            marks=pytest.mark.nightly,  # as graphs by slot do
        ),
        (("attn", "mlp"), {"recompute": "full"}, MODEL, OneForwardOneBackward(), "per_slot"),
        (("attn", "mlp"), {"recompute": ("mlp",)}, STILL, OneForwardOneBackward(), "per_microbatch"),
        pytest.param(
            ("attn", "mlp"),
            {"recompute": "full"},
            STILL,
            ZeroBubbleH1(),
            "per_microbatch",
            marks=pytest.mark.nightly,  # as 1F1B recomputes all, and the next two split the backward
        ),
        (("mlp",), {"recompute": ("core_attn", "mlp"), "offload": ("attn",)}, MODEL, ZeroBubbleH1(), "per_slot"),
        (("embedding", "head", "loss"), {"recompute": ("attn", "head", "loss")}, MODEL, ZeroBubbleH1(), "per_slot"),
        pytest.param(
            ("attn", "moe_router"),
            {"recompute": ("moe_experts",)},
            EXPERTS,
            OneForwardOneBackward(),
            "per_microbatch",
            marks=pytest.mark.nightly,  # the next one recomputes experts too
        ),
        (("attn", "moe_combine"), {"recompute": "full"}, EXPERTS, OneForwardOneBackward(), "per_microbatch"),
    ],
)
def test_recomputing_in_graphs_and_beside_them_changes_no_bit(
    scope: tuple[str, ...], train: dict[str, Any], model: GptOptions, schedule: Schedule, reuse: str
) -> None:
    """Dropout is drawn again in the backward, from another microbatch's stream if nobody positions it."""
    plain = Pipeline(schedule, 3, stages=2, model=model, scope=scope)
    captured = Pipeline(schedule, 3, stages=2, model=model, scope=scope, train=train, graph_reuse=reuse)
    for number in (1, 2, 3):
        if number == 2:
            captured.start_capture()
        assert plain.step(number).losses_and_weights_equal(captured.step(number)), number


def test_graphs_that_recompute_need_less_memory() -> None:
    """On the first stage, four microbatches in flight hold a region's inputs, not what it saves."""
    sizes = []
    for recompute in ("none", "full"):
        pipeline = Pipeline(
            OneForwardOneBackward(), 5, stages=4, model=STILL, scope=("attn", "mlp"), train={"recompute": recompute}
        )
        pipeline.step(1)
        sizes += pipeline.start_capture(0)
    whole, less = sizes
    assert (whole.graphs, whole.slots, whole.static_bytes) == (less.graphs, less.slots, less.static_bytes)
    assert whole.pool_bytes is not None
    assert less.pool_bytes is not None
    assert less.pool_bytes < 0.5 * whole.pool_bytes


def test_a_shape_that_does_not_fit_runs_eagerly_and_recomputes_with_the_same_draws() -> None:
    plain, captured = (
        Pipeline(OneForwardOneBackward(), 2, model=MODEL, train=train) for train in ({}, {"recompute": "full"})
    )
    assert plain.step(1).losses_and_weights_equal(captured.step(1))
    captured.start_capture()
    for stage in captured.stages:
        stage.capture._eager.add((2, 0, 1))  # as after another shape
    assert plain.step(2).losses_and_weights_equal(captured.step(2))
