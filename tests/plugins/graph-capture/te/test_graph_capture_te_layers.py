"""Graphs of layers of Transformer Engine, whose attention advances the device's random stream past the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.contracts import ParallelLayers, Schedule
from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.capture import RegionCapture
from megatron_run_engine.host.process import deterministic_kernels
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_graph_capture_te.capture import TeCapture, TeOptions
from megatron_run_graph_capture_te.library import find_engine
from megatron_run_parallel_layer_te import megatron_run_create_parallel_layer as create_layers
from megatron_run_parallel_layer_te.precision import Options
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_testing.build_contexts import on_device
from tests.plugins.device_graphs import device_capture
from tests.plugins.engine.graphed_on_device import DeviceLibrary
from tests.plugins.engine.layers import engine_layers
from tests.plugins.engine.philox import draw_from_gpu
from tests.plugins.graph_bench import Pipeline, partial_capture
from tests.plugins.optional_library import skip_without
from tests.support.device_memory import Device

DENSE = GptOptions(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1)
WIDE = DENSE.model_copy(update={"hidden_size": 128, "dropout": 0.0})
STILL = DENSE.model_copy(update={"dropout": 0.0})


def layers(context: BuildContext) -> ParallelLayers:
    """Those of parallel-layer=te."""
    draw_from_gpu(context)
    return engine_layers(context)


def te(context: BuildContext, *, scope: tuple[str, ...]) -> RegionCapture:
    """graph-capture=te."""
    library = DeviceLibrary(context.gradients, context.rng.streams)
    return TeCapture(context, TeOptions(scope=scope), lambda: library.engine)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the library has warnings of its own
@pytest.mark.parametrize("plugin", ["te", "partial"])
@pytest.mark.parametrize("scope", [("attn",), ("attn", "mlp")])
def test_captured_steps_of_the_library_are_eager_ones_on_a_gpu(plugin: str, scope: tuple[str, ...]) -> None:
    skip_without("transformer_engine")

    def capture(context: BuildContext) -> RegionCapture:
        if plugin == "te":
            return TeCapture(context, TeOptions(scope=scope), lambda: find_engine(context.device))
        return partial_capture(context, scope=scope)

    def real(context: BuildContext) -> ParallelLayers:
        made: ParallelLayers = create_layers(context, Options())
        return made

    def pipeline() -> Pipeline:
        return Pipeline(Sequential(), 2, model=WIDE, dtype=torch.bfloat16, layers=real, make=capture)

    with on_device("cuda:0"), deterministic_kernels("cuda:0"):
        eager, captured = pipeline(), pipeline()
        assert eager.step(1).losses_and_weights_equal(captured.step(1))
        captured.start_capture()
        for number in (2, 3):
            assert eager.step(number).losses_and_weights_equal(captured.step(number))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("capture", [te, device_capture], ids=["te", "partial"])
@pytest.mark.parametrize(
    ("schedule", "model", "scope"),
    [
        (Sequential(), DENSE, ("attn",)),
        (OneForwardOneBackward(), STILL, ("attn", "mlp")),
    ],
    ids=["attn with dropout", "a region of several segments"],
)
def test_captured_steps_are_eager_ones_bit_for_bit(
    schedule: Schedule, model: GptOptions, scope: tuple[str, ...], capture: Callable[..., RegionCapture]
) -> None:
    stages = 1 if isinstance(schedule, Sequential) else 2
    eager = Pipeline(schedule, 3, stages=stages, model=model, layers=layers)
    expected = [eager.step(number) for number in (1, 2, 3)]
    with Device():
        captured = Pipeline(schedule, 3, stages=stages, model=model, layers=layers, make=partial(capture, scope=scope))
        assert expected[0].equals(captured.step(1))
        captured.start_capture()
        assert all(expected[number - 1].equals(captured.step(number)) for number in (2, 3))
