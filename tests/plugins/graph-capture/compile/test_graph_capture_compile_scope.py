"""The scope where the user names nothing, and the bounds of the start of a run that compiles."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.config.request import Request
from megatron_run.contracts import Microbatch, Segment
from megatron_run.contracts.schedule import Action
from megatron_run.errors import GraphCaptureError
from megatron_run.files.user_cache import COMPILED
from megatron_run.planning import resolve
from megatron_run_cli.reports.dry_run import dry_run_text
from megatron_run_engine.builtin.model.gpt import ExpertOptions, GptOptions
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_graph_capture_compile.capture import CompileCapture, CompileOptions
from megatron_run_graph_capture_compile.compiler import find_compiler, own_workers
from megatron_run_testing.build_contexts import single_process_context
from tests.plugins.graph_bench import Pipeline
from tests.support.changed_options import changed

EXPERTS = GptOptions(
    num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.0, experts=ExpertOptions(count=4)
)
MICROBATCH = Microbatch(0, 1, 0, {})


def capture_of(context: BuildContext, **options: Any) -> CompileCapture:
    chosen = CompileOptions.model_validate({"backend": "aot_eager", **options})
    return CompileCapture(context, chosen, lambda: find_compiler(chosen.backend, chosen.mode))


@pytest.fixture
def for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scope of a run on CUDA; what it compiles works on the CPU."""
    monkeypatch.setattr(BuildContext, "trains_on", torch.device("cuda"))
    monkeypatch.setattr("megatron_run_engine.nn.parallel.split_layers.takes_counts", lambda *_: True)


def regions(options: GptOptions) -> list[str]:
    (stage,) = Pipeline(Sequential(), 1, model=options, make=capture_of).stages  # type: ignore[arg-type]
    return [" ".join(segment.name for segment in region.segments) for region in stage.regions]


def test_a_cpu_compiles_layers_without_the_products_of_experts() -> None:
    assert regions(EXPERTS) == ["attn moe_router moe_preprocess", "moe_combine"] * 2


def test_a_gpu_compiles_everything_each_layer_as_one(for_a_gpu: None) -> None:
    layer = "attn moe_router moe_preprocess moe_dispatch moe_experts moe_combine"
    assert regions(EXPERTS) == ["embedding", layer, layer, "head loss"]


def test_what_must_run_eagerly_is_left_out_where_nobody_has_named_it(for_a_gpu: None) -> None:
    options = changed(EXPERTS, {"experts.capacity_factor": 1.0})
    assert regions(options) == [
        "embedding",
        *["attn moe_router moe_preprocess", "moe_combine"] * 2,
        "head loss",
    ]


def test_the_scope_of_a_gpu_leaves_the_bits_of_eager_steps(for_a_gpu: None) -> None:
    """Here by the same operations: experts whose products read their counts where they are, head and loss."""
    eager = Pipeline(Sequential(), 2, model=EXPERTS, scope=("attn",))
    compiled = Pipeline(Sequential(), 2, model=EXPERTS, make=capture_of)  # type: ignore[arg-type]
    assert eager.step(1).equals(compiled.step(1))
    (size,) = compiled.start_capture()
    assert (size.regions, size.graphs) == (4, 6)
    for number in (2, 3):
        replayed, expected = compiled.step(number), eager.step(number)
        assert all(map(torch.equal, replayed.losses, expected.losses))
        assert all(map(torch.equal, replayed.weights, expected.weights))


@pytest.mark.parametrize(
    ("device", "gpus", "ranks", "on_gpu"),
    [
        ("cpu", 1, 1, False),
        ("cuda", 0, 1, True),
        pytest.param("auto", 0, 1, False, marks=pytest.mark.nightly),  # as the next, but for one GPU less
        ("auto", 1, 1, True),
        ("auto", 1, 2, False),
    ],
)
def test_a_dry_run_names_what_would_be_compiled(
    device: str, gpus: int, ranks: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    sets = (f"run.device={device}", f"parallel.data={ranks}")
    run = resolve(Request(("preset:tiny",), sets, ("graph-capture=compile",), nproc=ranks))
    names = "embedding, attn, mlp, head, loss" if on_gpu else "attn, mlp"
    assert f"\ngraphs of {names}\n" in dry_run_text(run)


def one_layer(fn: Any, **options: Any) -> tuple[CompileCapture, Any]:
    """A captured layer that is ``fn`` alone."""
    context = single_process_context(dtype=torch.float32)
    capture = capture_of(context, **options)
    (region,) = capture.regions([[Segment("attn", 3, 0, fn, ("x",), ("x",), ())]])
    example = torch.empty(4, 4, device="meta", requires_grad=True)
    capture.capture([region], [Action("F", 0, 0), Action("B", 0, 0)], {region: (example,)})
    return capture, region


def reads(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


def test_what_breaks_a_rule_runs_eagerly_unless_it_was_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        capture, region = one_layer(reads)
    assert "attn of layer 3 runs eagerly: segment attn of layer 3 cannot be captured: its forward reads" in caplog.text
    x = torch.ones(4, 4, requires_grad=True)
    assert torch.equal(capture.replay(region, MICROBATCH, x)[0], 2 * x)
    assert torch.equal(capture.replay(region, MICROBATCH, -x)[0], -3 * x)
    with pytest.raises(GraphCaptureError, match="its forward reads a tensor on the host"):
        one_layer(reads, scope=("attn",))


def test_another_shape_that_breaks_a_rule_runs_eagerly_too(caplog: pytest.LogCaptureFixture) -> None:
    total = torch.zeros(4)

    def adds_up_small_ones(x: Tensor) -> Tensor:
        if len(x) < 4:
            total.add_(1)
        return x * 2

    capture, region = one_layer(adds_up_small_ones)
    total.zero_()
    x = torch.ones(4, 4, requires_grad=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(capture.replay(region, MICROBATCH, x[:2])[0], 2 * x[:2])
    assert caplog.text.count("attn of layer 3 runs eagerly: attn of layer 3 cannot be compiled: it writes to") == 1
    assert torch.equal(capture.replay(region, MICROBATCH, x)[0], 2 * x)  # what was compiled before goes on
    capture, region = one_layer(adds_up_small_ones, scope=("attn",))
    with pytest.raises(GraphCaptureError, match="it writes to a tensor"):
        capture.replay(region, MICROBATCH, x[:2])


class Pool:
    """Processes in which inductor compiles."""

    ended = False

    def shutdown(self) -> None:
        self.ended = True


def test_workers_end_with_a_capture_and_those_of_the_program_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = import_module("torch._inductor.async_compile")
    other, own = Pool(), Pool()
    monkeypatch.setattr(workers, "_pool_set", {other})
    with own_workers():
        pass
    assert not other.ended
    workers._pool_set.clear()

    def refused(x: Tensor) -> Tensor:
        workers._pool_set.add(own)
        return reads(x)

    with pytest.raises(GraphCaptureError):
        one_layer(refused, scope=("attn",))
    assert own.ended


def test_no_more_graphs_are_compiled_than_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(4, 4, requires_grad=True)
    capture, region = one_layer(lambda x: x * 2, graph_limit=3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(capture.replay(region, MICROBATCH, x[:2])[0], 2 * x[:2])
    assert caplog.text.count("runs eagerly: 2 graphs are compiled (graph-capture.graph_limit)") == 1


@pytest.fixture
def doubles() -> Iterator[Any]:
    """An operation of a library of its own that writes over its argument."""
    library = Library("compiled_here", "FRAGMENT")
    library.define("double_(Tensor(a!) x) -> ()")
    for device in ("CPU", "Meta"):
        library.impl("double_", _double, device)
    yield torch.ops.compiled_here.double_
    library._destroy()


def _double(x: Tensor) -> None:
    x.mul_(2)


def test_an_operation_of_another_library_may_write_in_place(doubles: Any) -> None:
    def layer(x: Tensor) -> Tensor:
        y = x + 1
        doubles(y.detach())
        return y * x

    capture, region = one_layer(layer)
    x = torch.randn(4, 4, requires_grad=True)
    (y,) = capture.replay(region, MICROBATCH, x)
    torch.testing.assert_close(y, 2 * (x + 1) * x)


def test_inductor_is_given_what_its_cache_on_disk_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes with an environment of symbols; and neither checks of each call nor more workers than threads."""
    given: list[dict[str, Any]] = []

    def compiles(graph: Any, _: Any, options: dict[str, Any]) -> Any:
        context = TracingContext.try_get()
        assert context is not None
        assert context.fake_mode is not None
        assert context.fake_mode.shape_env is not None
        given.append(options)
        return graph

    monkeypatch.setattr("torch._inductor.compile", compiles)
    find_compiler("inductor", "default")(make_fx(lambda x: (x.sin(),))(torch.ones(2)), [torch.ones(2)])
    (options,) = given
    assert (options["size_asserts"], options["compile_threads"]) == (False, torch.get_num_threads())


@pytest.mark.nightly  # a cold cache: the C++ compiler works for a minute
def test_inductor_finds_what_an_earlier_run_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv(COMPILED, str(tmp_path))
    x = torch.randn(4, 4)
    graph, found = make_fx(lambda x: (x.sin().cos(),))(x), []
    for _ in range(2):
        counters.clear()
        with torch.no_grad():
            compiled = find_compiler("inductor", "default")(graph, [x])
        torch.testing.assert_close(compiled(x)[0], x.sin().cos())
        found.append({name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "hit", "bypass")})
    assert found == [{"miss": 1, "hit": 0, "bypass": 0}, {"miss": 0, "hit": 1, "bypass": 0}]
