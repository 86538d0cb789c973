"""``graph-capture=te`` where memory behaves as on a GPU: what neither side of the handover holds is lost."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.contracts import Schedule
from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.capture import RegionCapture
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_graph_capture_te.capture import TeCapture, TeOptions
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_interleaved import Interleaved
from megatron_run_testing.graph_capture import graph_capture_checks
from tests.contracts.conformance import failures
from tests.plugins.engine.graphed_on_device import DeviceLibrary
from tests.plugins.graph_bench import Pipeline
from tests.support.changed_options import changed
from tests.support.device_memory import Device

DENSE = GptOptions(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1)
EXPERTS = changed(DENSE, {"experts.count": 2, "experts.top_k": 2})


def capture(context: BuildContext, *scope: str) -> RegionCapture:
    """The plugin's object over such a library."""
    library = DeviceLibrary(context.gradients, context.rng.streams)
    return TeCapture(context, TeOptions(scope=scope), lambda: library.engine)


@pytest.mark.nightly  # by day it does over a stand-in, and a step of experts leaves its bits here
@pytest.mark.timeout(60)
def test_it_conforms() -> None:
    with Device():
        assert failures(graph_capture_checks(lambda context: capture(context, "attn"))) == {}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("schedule", "microbatches", "shape", "model", "scope"),
    [
        pytest.param(Sequential(), 2, {}, DENSE, ("attn",), marks=pytest.mark.nightly),
        pytest.param(
            OneForwardOneBackward(), 3, {"stages": 2}, DENSE, ("attn", "mlp", "head", "loss"), marks=pytest.mark.nightly
        ),
        (OneForwardOneBackward(), 3, {"stages": 2}, EXPERTS, ("attn", "moe_router", "moe_preprocess", "moe_combine")),
        pytest.param(  # partial's graphs show by day that chunks of a device are kept apart
            Interleaved(),
            4,
            {"stages": 2, "chunks": 2},
            DENSE.model_copy(update={"num_layers": 4}),
            ("mlp",),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["alone", "1f1b", "experts", "interleaved"],
)
def test_steps_are_eager_ones_bit_for_bit(
    schedule: Schedule, microbatches: int, shape: dict[str, Any], model: GptOptions, scope: tuple[str, ...]
) -> None:
    eager = Pipeline(schedule, microbatches, model=model, **shape)
    expected = [eager.step(number) for number in (1, 2, 3)]
    with Device():
        captured = Pipeline(schedule, microbatches, model=model, make=lambda c: capture(c, *scope), **shape)
        assert expected[0].equals(captured.step(1))
        captured.start_capture()
        assert all(expected[number - 1].equals(captured.step(number)) for number in (2, 3))
