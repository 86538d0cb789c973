"""``graph-capture=te`` over Transformer Engine itself: its own ``make_graphed_callables``, on tapes in CPU memory.

Only ``torch.cuda``'s graphs, streams and generators are replaced, so that the library's order, sharing of buffers, and
autograd function are what is tried. Skipped where the library is missing; ``make te`` brings it.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.contracts import ParallelLayers
from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.capture import RegionCapture
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_graph_capture_te.capture import TeCapture, TeOptions
from megatron_run_graph_capture_te.library import Engine, find_engine
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_interleaved import Interleaved
from megatron_run_testing.graph_capture import graph_capture_checks
from tests.contracts.conformance import failures
from tests.plugins.device_graphs import Pool
from tests.plugins.engine.cuda_on_tapes import Machine, pretend, weak_refs
from tests.plugins.engine.layers import engine_layers
from tests.plugins.engine.philox import draw_from_gpu
from tests.plugins.graph_bench import Pipeline, whole_tensor_layers
from tests.plugins.optional_library import skip_without
from tests.support.changed_options import changed
from tests.support.device_memory import Device

pytestmark = [pytest.mark.te, pytest.mark.filterwarnings("default")]  # the library has warnings of its own

DENSE = GptOptions(num_layers=4, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1)
MOE = changed(DENSE, {"num_layers": 2, "experts.count": 2, "experts.top_k": 2})
MAPS = ("attn", "moe_router", "moe_preprocess", "moe_combine")


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The library, as a run finds it on a GPU."""
    skip_without("transformer_engine")
    return find_engine(torch.device("cuda", 0))


@pytest.fixture
def machine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A device of tapes, with its memory, for the library too."""
    import transformer_engine.pytorch.graph as library

    monkeypatch.setattr(library, "make_weak_ref", weak_refs)
    monkeypatch.setattr(library, "graph_pool_handle", Pool)
    with Device():
        yield pretend(monkeypatch)


def made(engine: Engine, *scope: str, **options: Any) -> Any:
    """What makes the capture of a :class:`Pipeline`."""

    def make(context: BuildContext) -> RegionCapture:
        return TeCapture(context, TeOptions(scope=scope or ("attn", "mlp"), **options), lambda: engine)

    return make


def pair(schedule: Any, microbatches: int, engine: Engine, *scope: str, **options: Any) -> tuple[Pipeline, Pipeline]:
    """An eager pipeline and one that has captured, after the same first step."""
    eager, captured = (Pipeline(schedule, microbatches, make=made(engine, *scope), **options) for _ in range(2))
    assert eager.step(1).equals(captured.step(1))
    captured.start_capture()
    return eager, captured


def test_what_it_is_handed_are_arguments_of_the_library(engine: Engine) -> None:
    given = {
        "num_warmup_iters": 1,
        "allow_unused_input": True,
        "sample_kwargs": [],
        "_order": [],
        "_num_layers_per_chunk": [],
        "_reuse_graph_input_output_buffers": True,
    }
    bound = inspect.signature(engine.make_graphed_callables).bind((), [], **given)
    assert bound.arguments == {"modules": (), "sample_args": [], **given}


@pytest.mark.parametrize("scope", [("attn",), ("attn", "mlp"), ("attn", "mlp", "head", "loss")])
def test_it_conforms(engine: Engine, machine: Machine, scope: tuple[str, ...]) -> None:
    options = TeOptions(scope=scope)
    assert failures(graph_capture_checks(lambda context: TeCapture(context, options, lambda: engine))) == {}
    assert machine.operations
    assert {*machine.modes} == {"thread_local"}


@pytest.mark.parametrize(
    ("schedule", "microbatches", "shape"),
    [
        (Sequential(), 6, {}),
        (OneForwardOneBackward(), 6, {"stages": 4}),
        (Interleaved(), 8, {"stages": 2, "chunks": 2}),
    ],
    ids=["alone", "1f1b", "interleaved"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_eager_ones_bit_for_bit(
    engine: Engine, machine: Machine, schedule: Any, microbatches: int, shape: dict[str, int], dtype: torch.dtype
) -> None:
    eager, captured = pair(schedule, microbatches, engine, model=DENSE, dtype=dtype, **shape)
    for step in (2, 3, 4):
        assert eager.step(step).equals(captured.step(step))


@pytest.mark.parametrize("scope", [("moe_preprocess",), ("attn", "moe_preprocess"), ("attn", "moe_combine"), MAPS])
@pytest.mark.parametrize("stages", [1, 2])
def test_parts_of_a_layer_of_experts_are_eager_ones_bit_for_bit(
    engine: Engine, machine: Machine, scope: tuple[str, ...], stages: int
) -> None:
    """Among them regions without a backward, and regions with different inputs whose buffers the library shares."""
    schedule = OneForwardOneBackward() if stages > 1 else Sequential()
    eager, captured = pair(schedule, 4, engine, *scope, model=MOE, stages=stages)
    for step in (2, 3):
        assert eager.step(step).equals(captured.step(step))
    for stage in captured.stages:
        assert not any(cell.requires_grad for cell in stage.context.metrics._cells.values())


@pytest.mark.parametrize("stages", [1, 2])
def test_padded_experts_are_captured_whole_and_are_eager_ones_bit_for_bit(
    engine: Engine, machine: Machine, stages: int
) -> None:
    schedule = OneForwardOneBackward() if stages > 1 else Sequential()
    model = changed(MOE, {"experts.capacity_factor": 0.75, "experts.pad_to_capacity": True})
    layer = ("moe_router", "moe_preprocess", "moe_dispatch", "moe_experts", "moe_combine")
    eager, captured = pair(schedule, 4, engine, "attn", *layer, model=model, stages=stages)
    assert sum(len(stage.regions) for stage in captured.stages) == 4  # of two layers
    for step in (2, 3):
        assert eager.step(step).equals(captured.step(step))


def layers(context: BuildContext) -> ParallelLayers:
    """Those of parallel-layer=te, with the stand-in for its kernels: these need a GPU."""
    draw_from_gpu(context)
    return engine_layers(context)


def test_layers_whose_attention_advances_the_stream_past_the_dispatcher(engine: Engine, machine: Machine) -> None:
    eager, captured = pair(OneForwardOneBackward(), 3, engine, layers=layers, stages=2)
    for step in (2, 3):
        assert eager.step(step).equals(captured.step(step))


def test_a_stream_that_ranks_share_is_registered(engine: Engine, machine: Machine) -> None:
    eager, captured = pair(Sequential(), 2, engine, layers=whole_tensor_layers)
    assert all(captured.stages[0].context.rng.replicated in graph.generators for graph in machine.graphs)
    assert engine.distributed.get_all_rng_states() == {}
    assert eager.step(2).equals(captured.step(2))


def test_without_it_the_capture_ends_in_an_error(
    engine: Engine, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: the graphs of this machine refuse what PyTorch's refuse."""
    monkeypatch.setattr(engine.distributed, "set_all_rng_states", lambda _: None)
    pipeline = Pipeline(Sequential(), 2, make=made(engine), layers=whole_tensor_layers)
    pipeline.step(1)
    with pytest.raises(RuntimeError, match="not in capture mode"):
        pipeline.start_capture()


def test_graphs_do_not_grow_with_microbatches_without_a_pipeline(engine: Engine, machine: Machine) -> None:
    sizes = []
    for microbatches in (2, 8):
        before = len(machine.graphs)
        _, captured = pair(Sequential(), microbatches, engine)
        (stage,) = captured.stages
        assert stage.size is not None
        assert len(machine.graphs) - before == stage.size.graphs
        sizes.append(stage.size)
    assert sizes[0] == sizes[1]


def test_memory_grows_with_microbatches_in_flight_and_not_with_their_number(
    engine: Engine, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For regions with different inputs too: the library shares buffers among those that are alike."""
    import transformer_engine.pytorch.graph as library

    peaks = []
    for microbatches in (2, 8):
        pools: list[Pool] = []
        monkeypatch.setattr(library, "graph_pool_handle", lambda made=pools: made.append(Pool()) or made[-1])
        pair(OneForwardOneBackward(), microbatches, engine, *MAPS, model=MOE, stages=2)
        peaks.append(sum(pool.peak for pool in pools))
    assert peaks[1] <= 1.15 * peaks[0]


def test_nothing_of_a_step_is_kept_after_it(engine: Engine, machine: Machine) -> None:
    _, captured = pair(Sequential(), 2, engine, "moe_router", "moe_preprocess", model=MOE)
    (stage,) = captured.stages
    seen: list[weakref.ref[Any]] = []
    replay = stage.capture.replay

    def watched(*arguments: Any) -> tuple[torch.Tensor, ...]:
        outputs = replay(*arguments)
        seen.extend(weakref.ref(output.grad_fn) for output in outputs if output.grad_fn is not None)
        return outputs

    stage.capture.replay = watched  # type: ignore[assignment, method-assign]  # to look at what it returns
    captured.step(2)
    gc.collect()
    assert seen
    assert not any(reference() for reference in seen)
