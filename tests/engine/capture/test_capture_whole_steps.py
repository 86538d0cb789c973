"""Steps that are captured whole: bit for bit those of the executor, and refused where the host must act within."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.nn import Parameter

from megatron_run.config.request import Request
from megatron_run.errors import GraphCaptureError, InputError, PluginError, Problems
from megatron_run.planning import resolve
from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text
from megatron_run_engine.runtime import GradientAccumulator
from megatron_run_engine.runtime.execute import Executor, StepRecord
from megatron_run_engine.training.loss_weights import LossWeights
from megatron_run_engine.training.trainer import Trainer
from megatron_run_graph_capture_compile.compiled import CompiledRegion, Graphs, GraphStore
from megatron_run_graph_capture_compile.graph_trace import Trace
from tests.support.training import Seen, train_here, train_many

LITTLE = (
    "train.sequence_length=16",
    "train.steps=4",
    "eval.batches=1",
    "eval.interval=3",
    "model.num_layers=2",
    "model.dropout=0",
)
PADDED = (
    "model.experts.count=4",
    "model.experts.top_k=2",
    "model.experts.capacity_factor=1.0",
    "model.experts.pad_to_capacity=true",
)
#: They follow from what each replay counts.
BIASED = ("model.experts.router.bias_rate=0.05",)
GROWING = ("train.steps=5", "train.ramp_up.start=4", "train.ramp_up.increment=4", "train.ramp_up.samples=8")
STEP = "graph-capture=partial,scope=step"
#: The same step of compiled regions; with this backend they have the bits of eager ones.
COMPILED = "graph-capture=compile,scope=step,backend=aot_eager"
#: Name -> (plugins, settings).
ALONE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "overflow": (
        ("scaler=dynamic",),
        ("train.precision=fp16", "scaler.initial_loss_scale=2097152", "scaler.hysteresis=1"),
    ),
    "dropless experts": ((), (*PADDED[:2], *BIASED)),
    "dropless experts in bf16": ((), (*PADDED[:2], "train.precision=bf16", "model.activation=swiglu")),
    "padded experts in bf16": ((), (*PADDED, *BIASED, "train.precision=bf16", "train.loss_mean=token")),
    "recomputed, in chunks": (("optimizer=zero1",), ("train.recompute=full", "model.loss_chunks=2")),
    "a growing batch": ((), GROWING),
}
RANKS = {
    "padded experts, their state in shares": (
        ("optimizer=zero1",),
        ("parallel.expert=2", *PADDED, *BIASED, "optimizer.overlap_param_gather=true", "optimizer.bucket_size=2000"),
    ),
    "tensor": (
        ("parallel-layer=tensor",),
        ("parallel.tensor=2", "parallel.sequence=true", "train.global_batch_size=4"),
    ),
}


def request(plugins: tuple[str, ...], sets: tuple[str, ...], *more: str, nproc: int = 1) -> Request:
    chosen = {each.partition("=")[0]: each for each in (*LITTLE, *sets)}  # the last one counts
    return Request(configs=("preset:tiny",), sets=tuple(chosen.values()), plugins=(*plugins, *more), nproc=nproc)


def each_way(world: int, plugins: tuple[str, ...], sets: tuple[str, ...]) -> list[Request]:
    """Eagerly, and captured whole in two ways."""
    return [request(plugins, sets, *more, nproc=world) for more in ((), (STEP,), (COMPILED,))]


def expect_same(eager: list[Seen], captured: list[Seen], *, compiled: bool) -> None:
    assert len(eager[0].losses) >= 4
    for mine, other in zip(captured, eager, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=0, abs=0, nan_ok=True)
        assert mine.norms == pytest.approx(other.norms, rel=0, abs=0, nan_ok=True)
        assert (mine.validation, mine.weights) == (other.validation, other.weights)
        assert mine.captured
        for said in mine.captured:
            assert said.captured.slots == 0
            assert compiled or (said.captured.regions, said.captured.graphs) == (1, 1)
            assert said.captured.static_bytes
            assert said.captured.pool_bytes


@pytest.mark.nightly  # as ranks do
@pytest.mark.multiproc
def test_whole_steps_leave_the_bits_of_the_executor() -> None:
    """Losses, norms, evaluations between them, and the weights in the end."""
    found = train_many(1, [each for case in ALONE.values() for each in each_way(1, *case)])
    for eager, captured, compiled in zip(found[::3], found[1::3], found[2::3], strict=True):
        expect_same(eager, captured, compiled=False)
        expect_same(eager, compiled, compiled=True)
    assert any(map(math.isnan, found[0][0].norms)), "no step overflowed"
    assert len(found[-1][0].captured) > 1, "another number of microbatches is captured again"


@pytest.mark.multiproc
def test_ranks_reduce_what_a_whole_step_has_added_up() -> None:
    """Buckets leave after the replay; a tensor rank's collectives lie within."""
    found = train_many(2, [each for case in RANKS.values() for each in each_way(2, *case)[:2]])
    for eager, captured in zip(found[::2], found[1::2], strict=True):
        expect_same(eager, captured, compiled=False)


@pytest.mark.nightly  # as what is recorded without a compiler
@pytest.mark.multiproc
def test_ranks_reduce_what_a_compiled_step_has_added_up() -> None:
    eager, _, compiled = each_way(2, *next(iter(RANKS.values())))
    expect_same(*train_many(2, [eager, compiled]), compiled=True)


@dataclass(frozen=True)
class Counted:
    """A run of whole steps: what it ``captured``, how often the executor ran, and each forward's compiled region."""

    captured: list[Any]
    executed: int
    regions: list[int]


@cache
def counted(plugin: str) -> Counted:
    """A run without evaluations but the last."""
    executed, regions, run, forward = list[bool](), list[int](), Executor.run, CompiledRegion.forward

    def counted_run(self: Executor, *arguments: Any) -> StepRecord:
        executed.append(True)
        return run(self, *arguments)

    def counted_forward(self: CompiledRegion, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        regions.append(id(self))
        return forward(self, tensors)

    with (
        mock.patch.object(Executor, "run", counted_run),
        mock.patch.object(CompiledRegion, "forward", counted_forward),
    ):
        seen = train_here(0, 1, request((), ("eval.interval=0",), plugin).to_json())
    return Counted(seen.captured, len(executed), regions)


@pytest.mark.parametrize("plugin", [STEP, COMPILED], ids=["partial", "compile"])
def test_the_executor_runs_no_more_once_a_step_is_captured(plugin: str) -> None:
    evaluation = 1
    assert counted(plugin).executed == 1 + 1 + evaluation  # the eager step, the recording


@pytest.mark.parametrize("plugin", [STEP, COMPILED], ids=["partial", "compile"])
def test_a_late_capture_counts_gradients_as_replays_of_it_do(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the first step has taught how often each gradient arrives, and buckets leave with the last arrival."""
    counted, arrived = list[int](), GradientAccumulator.arrived

    def listed(self: GradientAccumulator, parameters: Iterable[Parameter]) -> None:
        counted.append(len(given := list(parameters)))
        arrived(self, given)

    monkeypatch.setattr(GradientAccumulator, "arrived", listed)
    sets = ("train.steps=5", "optimizer.bucket_size=2000")
    eager, late = (
        train_here(0, 1, request(("optimizer=zero1",), sets, *more).to_json())
        for more in ((), (f"{plugin},capture_after=2",))
    )
    assert (late.losses, late.weights) == (eager.losses, eager.weights)
    assert late.captured
    assert counted[-1] >= 4 * 10, "each microbatch adds to each parameter"


def test_the_graph_holds_what_was_compiled() -> None:
    """Each region runs compiled for each microbatch, once, when the step is recorded."""
    run = counted(COMPILED)
    (said,) = run.captured
    assert len(set(run.regions)) == said.captured.regions
    assert len(run.regions) == said.captured.regions * 4  # microbatches


@pytest.mark.parametrize("plugin", [STEP, COMPILED], ids=["partial", "compile"])
def test_a_step_that_is_timed_runs_action_by_action(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = train_here(0, 1, request((), ()).to_json())
    records, accumulate = list[StepRecord](), Trainer._accumulate

    def timed(self: Trainer, microbatches: int, clock: object) -> StepRecord:
        odd = self._progress.step % 2
        records.append(accumulate(self, microbatches, time.perf_counter if odd else None))
        return records[-1]

    monkeypatch.setattr(Trainer, "_accumulate", timed)
    captured = train_here(0, 1, request((), (), plugin).to_json())
    assert (captured.losses, captured.weights) == (eager.losses, eager.weights)
    assert [bool(record.times) for record in records] == [False, True, False, True]
    assert len({len(record.executed) for record in records}) == 1


@pytest.mark.parametrize(
    ("plugins", "sets", "message"),
    [
        (("schedule=1f1b",), ("parallel.pipeline=2",), r"scope=step with parallel.pipeline=2: between the actions of"),
        ((), ("model.dropout=0.1",), r"cannot capture segment embedding of layer -1: the host positions the random"),
        (
            (),
            PADDED[:3],
            r"capture segment moe_dispatch of layer 0: the host reads .*since model\.experts\.capacity_factor",
        ),
        (
            (),
            (*PADDED[:2], "parallel.expert=2"),
            r"moe_dispatch of layer 0: the host reads .* since tokens travel among 2 expert-parallel ranks; not with",
        ),
        ((), ("train.offload=mlp",), r"scope=step with train.offload=mlp: what a graph saves stays"),
        ((), ("train.recompute=core_attn",), r"cannot capture segment attn of layer 0: train.recompute=core_attn"),
        (
            ("graph-capture=partial,scope=step,graph_reuse=per_slot",),
            (),
            "scope=step with graph_reuse=per_slot: a whole step is one",
        ),
        (("graph-capture=partial,scope=step,attn",), (), r"scope names step, which holds everything, and attn \(from"),
        (("graph-capture=te,scope=step",), (), "graph-capture=te captures no whole steps; choose --plugin"),
        (("graph-capture=compile,scope=step,mlp",), (), r"scope names step, which holds everything, and mlp \(from"),
        (
            ("graph-capture=compile,scope=step", "parallel-layer=tensor"),
            ("parallel.tensor=2",),
            "compile,scope=step with parallel.tensor=2: compiled regions call collectives that no",
        ),
        (("graph-capture=compile,scope=step",), ("train.offload=mlp",), "scope=step with train.offload=mlp: what a"),
    ],
)
def test_what_the_host_must_do_within_a_step_is_refused_before_a_run(
    plugins: tuple[str, ...], sets: tuple[str, ...], message: str
) -> None:
    capture = () if plugins[:1] and plugins[0].startswith("graph-capture") else (STEP,)
    with pytest.raises((InputError, Problems), match=message):
        dry_run_text(
            resolve(
                request(plugins, sets, *capture, nproc=2 if any(each.startswith("parallel.") for each in sets) else 1)
            )
        )


def test_what_inductor_compiles_for_a_cpu_is_refused_where_the_device_is_known() -> None:
    (plugin,) = resolve(request((), (), "graph-capture=compile,scope=step")).plugins["graph-capture"]
    with pytest.raises(PluginError, match="backend=inductor on a CPU: what it compiles for CPUs cannot be recorded"):
        plugin.check_device("cpu")


def test_a_dry_run_plans_one_graph() -> None:
    run = resolve(request((), (), STEP))
    assert dry_run_json(run)["graphs_by_stage"] == [{"regions": 1, "graphs": 1, "slots": 0}]


def test_a_dry_run_plans_compiled_regions_and_the_graph_that_holds_them() -> None:
    (planned,) = dry_run_json(resolve(request((), (), COMPILED)))["graphs_by_stage"]
    (captured,) = counted(COMPILED).captured
    assert planned == {"regions": captured.planned.regions, "graphs": captured.planned.graphs, "slots": 0}
    assert (captured.captured.regions, captured.captured.graphs) == (planned["regions"], planned["graphs"])


def test_a_compiled_step_that_fits_no_more_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that grows: its steps, in between eager ones, have the bits of eager steps."""
    made, make = list[object](), GraphStore._make

    def counted(self: GraphStore, trace: Trace, who: str) -> Graphs:
        made.append(who)
        return make(self, trace, who)

    monkeypatch.setattr(GraphStore, "_make", counted)
    eager, grown = (train_here(0, 1, request((), GROWING, *more).to_json()) for more in ((), (COMPILED,)))
    assert (grown.losses, grown.weights) == (eager.losses, eager.weights)
    first, again = grown.captured
    assert (first.captured.regions, first.captured.graphs) == (again.captured.regions, again.captured.graphs)
    assert len(made) == (first.captured.graphs - 1) / 2, "the graph is recorded again, and nothing compiled"


def test_what_is_read_on_the_host_between_segments_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No segment can be named: here it is the gradient with which a loss starts its backward."""
    seed = LossWeights.seed

    def reads(self: LossWeights, microbatches: int, name: str, weight: Tensor) -> Tensor:
        return seed(self, microbatches, name, weight.clamp(min=weight.item()))

    monkeypatch.setattr(LossWeights, "seed", reads)
    with pytest.raises(GraphCaptureError, match=r"between its segments reads a tensor on the host: Tensor\.item"):
        train_here(0, 1, request((), (), STEP).to_json())
