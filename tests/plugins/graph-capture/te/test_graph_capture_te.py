"""What Transformer Engine is handed, and what is made of its results, tried on a stand-in; and finding the library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.config.request import Request
from megatron_run.contracts.schedule import Action, signed_order
from megatron_run.errors import GraphCaptureError, InputError, PluginError
from megatron_run.planning import resolve
from megatron_run_cli.reports import dry_run
from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text
from megatron_run_engine.builtin.model.gpt import ExpertOptions, GptOptions
from megatron_run_engine.capture import Hooks, RegionCapture
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_graph_capture_te import check_device
from megatron_run_graph_capture_te.capture import TeCapture, TeOptions, check_config
from megatron_run_graph_capture_te.handover import GraphedRegion, can_share
from megatron_run_graph_capture_te.library import Engine, find_engine
from megatron_run_schedule_interleaved import Interleaved
from megatron_run_schedule_zero_bubble.h1 import ZeroBubbleH1
from megatron_run_testing import Check
from megatron_run_testing.graph_capture import graph_capture_checks
from tests.plugins.engine.graphed_stand_in import StandIn
from tests.plugins.graph_bench import Pipeline, whole_tensor_layers
from tests.plugins.optional_library import skip_without
from tests.support.checkout import ROOT
from tests.support.fake_plugins import FakeSite

CUDA = torch.device("cuda", 0)
#: Whether each input, and each output, has a gradient.
Facts = tuple[tuple[bool, ...], tuple[bool, ...]]


@pytest.fixture(autouse=True)
def without_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run counts activations for seconds, and nobody reads them here."""
    monkeypatch.setattr(dry_run, "_step_memory", lambda *_: None)


class Bench:
    """Makes captures over stand-ins and keeps these."""

    def __init__(self, *scope: str, accumulates: bool = False, **options: Any) -> None:
        self.options, self._accumulates = TeOptions(scope=scope or ("attn", "mlp"), **options), accumulates
        self.stand_ins: list[StandIn] = []

    def __call__(self, context: BuildContext) -> RegionCapture:
        stand_in = StandIn(context.gradients, accumulates=self._accumulates)
        self.stand_ins.append(stand_in)
        return TeCapture(context, self.options, lambda: stand_in.engine)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{name}: {check.name}")
        for name, accumulates in (("2.7", False), ("later", True))
        for check in graph_capture_checks(Bench(accumulates=accumulates))
    ],
)
def test_it_conforms_over_the_stand_in(check: Check) -> None:
    check.run()


def interleaved(bench: Bench, **options: Any) -> Pipeline:
    model = GptOptions(num_layers=4, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1)
    return Pipeline(Interleaved(), 4, stages=2, chunks=2, model=model, make=bench, **options)


@pytest.mark.parametrize("accumulates", [False, True], ids=["2.7", "later"])
def test_the_library_is_handed_the_plan(accumulates: bool) -> None:
    """Bar 14: the order, the layers of each chunk, and inputs that are shared as the slots are."""
    bench = Bench("attn", "mlp", warmup=2, accumulates=accumulates)
    pipeline, eager = interleaved(bench), interleaved(Bench())
    assert pipeline.step(1).equals(eager.step(1))
    sizes = pipeline.start_capture()
    for index, (stand_in, size) in enumerate(zip(bench.stand_ins, sizes, strict=True)):
        given = stand_in.given
        assert given["_order"] == signed_order(pipeline.actions(index))
        assert given["_num_layers_per_chunk"] == [2, 2]
        assert given["num_warmup_iters"] == 2
        assert given["allow_unused_input"]
        assert given["_reuse_graph_input_output_buffers"]
        assert len({id(x) for args in given["sample_args"] for x in args}) == 2 * size.slots
        assert size.slots == pipeline.plan.peak_in_flight[index]
        assert size.graphs == 2 * 2 * 2 * 4  # chunks, layers, microbatches
    assert pipeline.step(2).equals(eager.step(2))
    for mine, other in zip(pipeline.stages, eager.stages, strict=True):  # the ledger heard of every gradient
        assert [*mine.context.gradients._arrivals.values()] == [4 * 2] * len(mine.parameters)
        assert mine.context.gradients._arrivals.total() == other.context.gradients._arrivals.total()


def test_what_warm_ups_add_to_gradients_is_left_to_the_step_that_follows() -> None:
    """Every step begins by clearing them: a copy would take as much memory again."""
    captured, eager = Pipeline(Sequential(), 2, make=Bench("attn")), Pipeline(Sequential(), 2, make=Bench("attn"))
    captured.step(1), eager.step(1)
    (stage,) = captured.stages
    before = [main_grad(parameter).clone() for parameter in stage.parameters]
    captured.start_capture()
    assert not all(map(torch.equal, before, map(main_grad, stage.parameters)))
    assert captured.step(2).equals(eager.step(2))


@pytest.mark.parametrize("last", [False, True])
def test_what_leaves_a_chunk_is_a_copy_of_the_graphs_memory(last: bool) -> None:
    memory, nothing = torch.ones(3), Hooks(*[lambda: None] * 3)
    region = GraphedRegion(lambda _: memory, (), first=True, last=last, differentiable=(True,))
    (left,) = region.replay(nothing, [torch.zeros(3)])
    memory.zero_()
    assert left.tolist() == [1.0 if last else 0.0] * 3


MOE = GptOptions(num_layers=1, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.0, experts=ExpertOptions(count=2))


def test_buffers_are_shared_among_regions_with_different_inputs() -> None:
    """The library tells shapes and types apart by itself."""
    bench = Bench("attn", "moe_combine")
    pipeline, eager = (Pipeline(Sequential(), 2, model=MOE, make=make) for make in (bench, Bench("attn")))
    pipeline.step(1), eager.step(1)
    pipeline.start_capture()
    assert bench.stand_ins[0].given["_reuse_graph_input_output_buffers"]
    assert pipeline.step(2).equals(eager.step(2))


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (((True,), (True,)), ((True,), (True,)), True),
        (((True, False), (True,)), ((False, True), (True,)), False),  # an input's gradient would get lost
        (((True,), (True,)), ((True,), (True, False)), False),  # gradients are counted with the outputs
        (((True,), (True,)), ((True, True), (True, True)), True),
    ],
)
def test_buffers_are_not_shared_where_the_library_would_confuse_what_has_a_gradient(
    one: Facts, other: Facts, shared: bool
) -> None:
    def like(facts: Facts) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs, outputs = ([torch.empty(2, requires_grad=grad) for grad in each] for each in facts)
        return inputs, outputs

    assert can_share([like(one), like(other)]) is shared


@pytest.mark.parametrize("scope", [("moe_preprocess",), ("attn", "moe_preprocess"), ("moe_router", "moe_preprocess")])
def test_what_has_no_backward_is_replayed_without(scope: tuple[str, ...]) -> None:
    """Maps of tokens are whole numbers, and the spread of the load has no gradient although it is a fraction."""
    bench = Bench(*scope)
    pipeline, eager = (Pipeline(Sequential(), 3, model=MOE, make=make) for make in (bench, Bench("attn")))
    pipeline.step(1), eager.step(1)
    (size,), (stage,) = pipeline.start_capture(), pipeline.stages
    assert size.graphs == stage.capture.plan(stage.regions, pipeline.actions()).graphs
    for step in (2, 3):
        assert pipeline.step(step).equals(eager.step(step))
    reported = [cell.grad_fn for cell in stage.context.metrics._cells.values()]
    assert reported
    assert not any(reported)


def test_a_stream_that_ranks_share_is_registered_with_the_graphs() -> None:
    """Layers of a tensor-parallel factory draw from it on one rank too; a graph that does not know it cannot draw."""
    bench = Bench("attn")
    pipeline = Pipeline(Sequential(), 2, layers=whole_tensor_layers, make=bench)
    eager = Pipeline(Sequential(), 2, layers=whole_tensor_layers, make=Bench("attn"))
    pipeline.step(1), eager.step(1)
    pipeline.start_capture()
    (stand_in,), (stage,) = bench.stand_ins, pipeline.stages
    assert stage.context.rng.replicated in stand_in.registered
    assert [*stand_in.states] == ["its own"]
    assert pipeline.step(2).equals(eager.step(2))


def test_a_capture_forbids_nothing_to_other_threads() -> None:
    """A checkpoint may be written behind training, by a thread that waits for events and pins memory."""
    bench, before = Bench("attn"), torch.cuda.graph
    pipeline = Pipeline(Sequential(), 1, make=bench)
    pipeline.step(1)
    pipeline.start_capture()
    assert bench.stand_ins[0].capture.keywords == {"capture_error_mode": "thread_local"}
    assert torch.cuda.graph is before


def test_without_a_pipeline_one_recording_of_each_region_serves_every_microbatch() -> None:
    bench = Bench("attn", "mlp")
    pipeline, eager = Pipeline(Sequential(), 8, make=bench), Pipeline(Sequential(), 8)
    pipeline.step(1), eager.step(1)
    (size,), (stage,) = pipeline.start_capture(), pipeline.stages
    assert stage.capture.plan(stage.regions, pipeline.actions()).graphs == size.graphs == 2 * len(stage.regions)
    assert size.slots == 1
    assert bench.stand_ins[0].given["_order"] == [1, -1]
    assert pipeline.step(2).equals(eager.step(2))


def test_what_the_library_would_take_for_another_order_is_refused() -> None:
    bench = Bench("attn")
    pipeline = Pipeline(Sequential(), 2, make=bench)
    pipeline.step(1)
    (stage,) = pipeline.stages
    actions = [Action.parse(text) for text in ["F0.0", "F1.0", "B1.0", "B0.0"]]
    with pytest.raises(GraphCaptureError, match=r"action 2, B1\.0, .* would take it for microbatch 0; choose --plugin"):
        stage.capture.capture(stage.regions, actions, stage.context.segments.examples)
    assert not bench.stand_ins[0].given, "it is validated before the library is called"


def test_a_split_backward_is_refused() -> None:
    pipeline = Pipeline(ZeroBubbleH1(), 2, stages=2, make=Bench("attn"))
    pipeline.step(1)
    with pytest.raises(GraphCaptureError, match=r"W0\.0, cannot be served by graph-capture=te: what layers put"):
        pipeline.start_capture()


def test_a_region_without_a_gradient_to_pass_on_is_refused() -> None:
    """At the capture, where a parameter was frozen; the rest before a run."""
    pipeline = Pipeline(Sequential(), 2, make=Bench("attn"))
    chunk: Any = pipeline.stages[0].chunks[0]
    for parameter in chunk.embedding.parameters():
        parameter.requires_grad_(False)
    pipeline.step(1)
    with pytest.raises(GraphCaptureError, match="attn of layer 0 cannot be captured by graph-capture=te: nothing"):
        pipeline.start_capture()


@pytest.mark.parametrize(
    ("plugins", "sets", "message"),
    [
        (
            ("schedule=zero-bubble",),
            ("parallel.pipeline=2",),
            (
                "action 3, W0.0, cannot be served by graph-capture=te: what layers put off to W reads outputs that "
                "Transformer Engine has given to others by then; choose --plugin graph-capture=partial"
            ),
        ),
    ],
    ids=["split backward"],
)
def test_what_follows_from_the_configuration_is_refused_before_a_run(
    plugins: tuple[str, ...], sets: tuple[str, ...], message: str
) -> None:
    run = resolve(Request(configs=("preset:tiny",), sets=sets, plugins=(*plugins, "graph-capture=te")))
    with pytest.raises(GraphCaptureError) as refused:
        dry_run_text(run)
    assert str(refused.value) == message


@pytest.mark.parametrize("schedule", ["sequential", "1f1b"])
def test_what_is_given_tokens_alone_is_refused_before_a_run(schedule: str) -> None:
    """On every layout; what other stages learn is seen too."""
    plugins = ("graph-capture=te,scope=embedding", f"schedule={schedule}")
    run = resolve(Request(configs=("preset:tiny",), plugins=plugins))
    with pytest.raises(InputError, match=r"embedding of layer -1 cannot be captured by graph-capture=te: nothing that"):
        dry_run_text(run)
    others = ("graph-capture=te,scope=attn,mlp,head,loss", f"schedule={schedule}")
    dry_run_text(resolve(Request(configs=("preset:tiny",), plugins=others)))


def test_the_help_names_segments_that_can_be_captured() -> None:
    told = TeOptions.model_fields["scope"].description
    assert told is not None
    plugins = (f"graph-capture=te,scope={','.join(re.findall(r'attn|mlp|head|loss|moe_[a-z]+', told))}",)
    padded = ("model.experts.count=4", "model.experts.capacity_factor=1.0", "model.experts.pad_to_capacity=true")
    pattern = ("model.experts.layer_pattern=0,1", "model.dropout=0")
    run = resolve(Request(configs=("preset:tiny",), sets=(*padded, *pattern), plugins=plugins))
    assert "embedding" not in told
    assert dry_run_json(run)["graphs_by_stage"][0]["regions"] > 1


@pytest.mark.parametrize("sets", [(), ("parallel.sequence=true",)])
def test_dropout_over_ranks_is_planned(sets: tuple[str, ...]) -> None:
    sets = ("parallel.tensor=2", "model.dropout=0.1", *sets)
    plugins = ("parallel-layer=tensor", "graph-capture=te")
    run = resolve(Request(configs=("preset:tiny",), sets=sets, plugins=plugins))
    assert dry_run_json(run)["graphs_by_stage"] == [{"regions": 4, "graphs": 8, "slots": 1}]


def test_the_page_lists_what_is_refused() -> None:
    page = (ROOT / "plugins" / "graph-capture" / "te" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for words in (
        "`schedule=zero-bubble`",
        "no input with a gradient",
        "last microbatch first",
    ):
        assert any(words in row for row in rows), words


def test_a_library_that_returns_something_else_is_told() -> None:
    pipeline = Pipeline(
        Sequential(),
        2,
        make=lambda context: TeCapture(
            context, TeOptions(), lambda: Engine(lambda *_, **__: (), StandIn(context.gradients))
        ),
    )
    pipeline.step(1)
    with pytest.raises(GraphCaptureError, match="did not return 2 callables"):
        pipeline.start_capture()


_EMPTY = "raise RuntimeError('Found empty `transformer-engine` meta package installed. Install ...')\n"
#: State of the library -> (version, source of the package, what the message says).
STATES: dict[str, tuple[str | None, str, str]] = {
    "absent": (None, "", "needs Transformer Engine, which is not installed; type: pip install"),
    "empty": ("2.9.0", _EMPTY, "is its empty meta package: its extension for PyTorch, .*, is not installed; type: pip"),
    "broken": ("2.9.0", "raise ImportError('libcudnn.so.9')\n", "cannot be imported: ImportError: libcudnn"),
    "too old": ("2.6.0", "raise AssertionError('it was imported')\n", "2.6.0 is too old .*: 2.7 is the first"),
}


@pytest.mark.parametrize("state", STATES)
def test_a_library_that_cannot_be_used_is_told_with_what_to_type(state: str, tmp_path: Path) -> None:
    """Bar 14: four messages."""
    version, source, message = STATES[state]
    site = FakeSite(tmp_path / "site")
    if version is not None:
        site.module("transformer_engine", source)
        site.distribution("transformer-engine", {}, version=version)
    with site.importable(), pytest.raises(PluginError, match=f"{message}.*graph-capture=partial"):
        find_engine(CUDA)


def test_the_library_is_found_where_it_is(tmp_path: Path) -> None:
    site = FakeSite(tmp_path / "site")
    site.module("transformer_engine", "")
    site.module("transformer_engine/pytorch", "def make_graphed_callables(*_):\n    return 'graphs'\n")
    site.module("transformer_engine/pytorch/distributed", "")
    site.distribution("transformer-engine", {}, version="2.7.0")
    with site.importable():
        assert find_engine(CUDA).make_graphed_callables() == "graphs"


def test_a_cpu_is_refused_with_what_works_there() -> None:
    with pytest.raises(PluginError, match=r"needs an NVIDIA GPU: .*choose --plugin graph-capture=partial"):
        check_device("cpu", TeOptions())


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("train.recompute=full",), "graph-capture=te with train.recompute=full captures attn"),
        (("train.recompute=attn,mlp",), "graph-capture=te with train.recompute=attn,mlp captures attn"),
        (
            ("train.ramp_up.start=4", "train.ramp_up.increment=4", "train.ramp_up.samples=16"),
            "graph-capture.strict=true with train.ramp_up",
        ),
    ],
)
def test_what_could_never_be_served_is_refused_before_a_run(sets: tuple[str, ...], message: str) -> None:
    config = resolve(Request(configs=("preset:tiny",), sets=sets, nproc=1)).config
    with pytest.raises(InputError, match=message):
        list(check_config(config, TeOptions(strict=True)))


@pytest.mark.gpu
def test_it_conforms_on_a_gpu() -> None:
    """With the library itself."""
    skip_without("transformer_engine")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    engine = find_engine(CUDA)
    checks = graph_capture_checks(lambda context: TeCapture(context, TeOptions(), lambda: engine), device="cuda:0")
    for check in checks:
        check.run()
