"""The search splits samples where that pays, by the method that pays most, and writes what a run takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts.costs import AttentionCosts, Divided, FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.contracts.schema import Config
from megatron_run.errors import InputError, RunError
from megatron_run.planning import load_config, resolve
from megatron_run.planning.run import sections
from megatron_run_cli.main import main
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_parallel_layer_context import Options, check_config
from megatron_run_planner.commands.methods import compare
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.memory import least_memory
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.search import GAIN, Candidate, Choice, Search
from megatron_run_planner.split_samples import METHODS, short, why_not
from megatron_run_planner.task import check_sizes, read_task, to_type, written
from megatron_run_planner.workload import OPTIMIZERS, ModelSplit

GIB = 2**30
H100 = read_device("h100")


@pytest.fixture(scope="module")
def schedules() -> Schedules:
    return Schedules()


def with_memory(gib: float) -> Device:
    return read_device("a100").model_copy(update={"memory": gib * GIB})


def model(sequence: int, heads: int, kv_heads: int, *, layers: int = 8, rotary: bool = True) -> ModelCosts:
    """Layers of heads of 128 features, and a loss in chunks."""
    attention, hidden = AttentionCosts.plain(heads, 128, kv_heads, rotary=rotary), 128 * heads
    layer = LayerCosts(hidden, sequence, (attention, FeedForwardCosts(4 * hidden)), dropout=False)
    divided = Divided(heads, "heads"), Divided(kv_heads, "key-value heads")
    return ModelCosts((layer,) * layers, 32000, loss_chunks=16, divided=divided, computes_pieces=True)


def test_samples_are_split_that_fit_no_rank(schedules: Schedules) -> None:
    long, device = model(131072, 16, 2, layers=2), with_memory(8)
    with pytest.raises(InputError, match="the smallest needs"):
        Search(replace(long, computes_pieces=False), 8, 8, device, schedules).run()
    found = Search(long, 8, 8, device, schedules).run(keep=1000)
    assert min(each.split.context for each in found.best) > 1
    assert all(each.needed <= 8 * GIB and each.split.ranks == 8 for each in found.best)


def test_samples_are_split_where_they_are_fewer_than_ranks(schedules: Schedules) -> None:
    """Eight ranks cannot have two samples; with heads and layers for two they have pieces of them."""
    found = Search(model(65536, 16, 2, layers=2), 8, 2, with_memory(80), schedules).run(keep=1000)
    assert {each.split.context for each in found.best} >= {2, 4}
    assert found.best[0].split.context > 1


def test_short_samples_are_not_split(schedules: Schedules) -> None:
    found = Search(model(1023, 16, 2), 8, 64, with_memory(80), schedules).run(keep=1000)
    assert {each.split.context for each in found.best} == {1}
    assert found.pruned["samples too short to be split over ranks"] == 2  # beside one and two tensor ranks
    found = Search(model(2048, 16, 2, layers=1), 8, 8, with_memory(80), schedules).run(keep=1000)
    assert {each.split.context for each in found.best} == {1, 2, 4}


@pytest.mark.parametrize("length", [64, 1022, 1024, 2047, 2048, 131072])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_plan_splits_no_samples_of_which_a_start_says_that_they_are_short(length: int, ranks: int) -> None:
    config = SimpleNamespace(parallel=SimpleNamespace(context=ranks), train=SimpleNamespace(sequence_length=length))
    notices = list(check_config(cast("Config", config), Options()))
    assert short(model(length, 16, 2), ModelSplit(context=ranks)) is bool(notices)


def test_few_key_value_heads_are_gathered_by_all_ways_out_of_a_machine(schedules: Schedules) -> None:
    """They do not split over the ranks, and a ring leaves each machine by one card of 10 GB/s; many are exchanged."""
    device = H100.model_copy(update={"links": H100.links.model_copy(update={"machine_bandwidth": 10e9})})
    few, many = (model(16384, 32, kv_heads, layers=4) for kv_heads in (2, 32))
    best = Search(few, 64, 1, device, schedules).run(1).best[0]
    assert best.split.method == "all_gather"
    gathered, ring, exchanged = compare(few, best.split, device)
    assert (gathered.name, ring.name, exchanged.name) == ("all_gather", "ring", "ulysses")
    assert gathered.seconds < ring.seconds
    assert gathered.sent == ring.sent
    assert exchanged.refused
    best = Search(many, 64, 1, device, schedules).run(1).best[0]
    assert best.split.method == "ulysses"


def test_many_heads_are_exchanged_and_few_travel(schedules: Schedules) -> None:
    """Of as many key-value heads as queries a rank sends less by ``ulysses``, which is then faster."""
    many, few = model(131072, 16, 16), model(131072, 16, 1)
    best = Search(many, 8, 8, with_memory(20), schedules).run(1).best[0]
    assert best.split.context > 1
    exchanged, *others = compare(many, best.split, with_memory(20))
    assert (exchanged.name, best.split.method) == ("ulysses", "ulysses")
    assert all(exchanged.seconds < each.seconds and exchanged.sent < each.sent for each in others)
    best = Search(few, 8, 8, with_memory(20), schedules).run(1).best[0]
    assert best.split.method == "ring"
    assert best.split.context > 1


def test_the_fastest_method_is_not_taken_where_it_does_not_fit(schedules: Schedules) -> None:
    """Two ranks and one sample, of few key-value heads: ``ulysses`` is faster, and keeps a result twice a layer."""
    asked = replace(model(65536, 16, 4, rotary=False), divided=(Divided(1, "heads"),))
    split = ModelSplit(context=2, micro_batch=1, global_batch=1, optimizer="zero1")
    ring, ulysses = (least_memory(asked, replace(split, method=each)).needed() for each in ("ring", "ulysses"))
    assert ring < ulysses
    for memory, method in (((ring + ulysses) / 2 / GIB, "ring"), (80, "ulysses")):
        found = Search(asked, 2, 1, with_memory(memory), schedules).run(keep=1000).best
        whole = [each.split for each in found if each.split.context > 1 and each.split.recompute == "none"]
        assert {each.method for each in whole} == {method}


def everything(asked: ModelCosts, device: Device, schedules: Schedules, ranks: int, batch: int) -> list[Candidate]:
    """Every split of powers of two in chunks of one, with samples of one and more in a microbatch, by every method."""
    search, found = Search(asked, ranks, batch, device, schedules), []
    shapes = product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), ("none", "mlp", "full"), OPTIMIZERS, METHODS)
    for tensor, context, pipeline, micro_batch, recompute, optimizer, method in shapes:
        data, left = divmod(ranks, tensor * context * pipeline)
        if left or not data or batch % (micro_batch * data) or (context == 1 and method != "ring"):
            continue
        split = ModelSplit(
            tensor=tensor,
            context=context,
            pipeline=pipeline,
            data=data,
            method=method,
            micro_batch=micro_batch,
            global_batch=batch,
            recompute=cast("Any", recompute),
            sequence_parallel=tensor > 1,
            optimizer=optimizer,
            overlap=True,
            gradient_bytes=4,
        )
        if why_not(asked, split) or (split.shards and split.replicas == 1):
            continue
        names = schedules.serving(1) if pipeline > 1 else ["sequential"]
        found += [each for name in names if (each := search.judge(split, name))]
    return found


@pytest.mark.parametrize("memory", [6, 80])
def test_nothing_that_is_left_out_is_faster(memory: float, schedules: Schedules) -> None:
    """Neither other methods, nor several split samples in a microbatch."""
    asked, device = model(16384, 8, 4, layers=4), with_memory(memory)
    found = Search(asked, 4, 8, device, schedules).run().best[0]
    every = everything(asked, device, schedules, 4, 8)
    assert {each.split.context for each in every} == {1, 2, 4}
    assert found.step.seconds <= min(each.step.seconds for each in every if not each.split.lends) * (1 + 1e-9)
    assert found.step.seconds <= min(each.step.seconds for each in every) / (1 - GAIN)


LONG = {
    "model": {"use": "gpt", "num_layers": 6, "hidden_size": 1024, "num_heads": 8, "vocab_size": 32000, "dropout": 0.0},
    "train": {"sequence_length": 32768, "global_batch_size": 2, "steps": 10, "precision": "bf16"},
    "data": {"use": "mock", "vocab_size": 32000},
}


def searched(request: Request, schedules: Schedules, memory: float = 6) -> tuple[Any, Choice]:
    task = read_task(request, 8)
    return task, Search(task.model, 8, task.split.global_batch, with_memory(memory), schedules).run(keep=1000)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"parallel": {"context": 4}, "parallel_layer": {"use": "dense+context", "method": "all_gather"}},
        {"parallel": {"pipeline": 2}, "parallel_layer": {"use": "dense+lora"}},
    ],
    ids=["none", "another", "adapters"],
)
def test_what_to_type_is_what_is_written(own: dict[str, Any], tmp_path: Path, schedules: Schedules) -> None:
    """The ranks of a sample, their layers and the method, also over those that the configuration has."""
    request = Request(({**LONG, **own},))
    task, found = searched(request, schedules)
    ways = {(each.split.context, each.split.method, each.split.tensor > 1): each for each in found.best}
    assert {context > 1 for context, *_ in ways} == {True, False}
    assert {split for context, _, split in ways if context > 1} == {True, False}
    for number, each in enumerate(ways.values()):
        file = tmp_path / f"{number}.yaml"
        file.write_text(written(task, each), encoding="utf-8")
        filed = load_config(file, environment={})
        spoken = resolve(replace(request, sets=tuple(to_type(task, each)), nproc=8))
        assert sections(spoken) == sections(filed)
        assert filed.sizes.context == each.split.context
        assert filed.sizes.tensor == each.split.tensor
        again = read_task(Request((str(file),)), None)
        assert (again.split.context, again.split.ranks) == (each.split.context, 8)
        if each.split.context > 1:
            assert again.split.method == each.split.method
            assert filed.plugins["parallel-layer"][-1].name == "context"


def test_a_plan_says_why_a_method_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedules: Schedules
) -> None:
    _, found = searched(Request((LONG,)), schedules)
    best = found.best[0]
    file = tmp_path / "long.yaml"
    settings = [f"{section}.{key}={value}" for section in LONG for key, value in cast("Any", LONG)[section].items()]
    chosen = [word for setting in settings if ".use=" not in setting for word in ("--set", setting)]
    words = ["plan", "preset:tiny", *chosen, "--gpus", "8", "--device", "a100", "--memory", "6GiB"]
    assert main([*words, "--write", str(file)]) == 0
    said = capsys.readouterr().out
    first, *others = compare(read_task(Request((str(file),)), 8).model, best.split, with_memory(6))
    line = next(line for line in said.splitlines() if line.startswith("a layer and microbatch"))
    assert line.startswith(f"a layer and microbatch by {first.name} {first.seconds * 1e3:,.2f} ms, ")
    assert all(
        f"; by {each.name} {each.seconds * 1e3:,.2f} ms, {each.sent / 2**20:,.0f} MiB sent" in line for each in others
    )
    assert f"{best.split.context} {best.split.method}  " in said
    assert f"parallel-layer.method={best.split.method}" in said


_SEQUENCE = {"parallel.sequence": "true", "parallel.tensor": 4, "model.num_heads": 4}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train.sequence_length": 1002}, "train.sequence_length=1002 does not split over parallel.context=2"),
        ({"model.num_kv_heads": 1, "parallel-layer.method": "ulysses"}, "1 key-value heads"),
        ({"train.sequence_length": 1004, **_SEQUENCE}, "502 tokens of train.sequence_length do not split over 4"),
        ({"model": "bert"}, "computes whole samples, and parallel.context=2 splits"),
        ({}, ""),
    ],
    ids=["tokens", "heads", "tokens of tensor ranks", "whole samples", "nothing"],
)
def test_what_no_run_splits_the_planner_refuses(settings: dict[str, Any], words: str) -> None:
    usual = {"train.sequence_length": 1024, "parallel.context": 2, "parallel-layer": "tensor+context"}
    sets = {**usual, "parallel.tensor": 1, **settings}
    request = Request(("preset:tiny",), tuple(f"{key}={value}" for key, value in sets.items()), nproc=8)
    task = read_task(request, 8)
    if not words:
        check_sizes(task, 8)
        model_size(resolve(request))
        return
    with pytest.raises(InputError, match=words):
        check_sizes(task, 8)
    with pytest.raises(RunError, match=words):
        model_size(resolve(request))


def test_devices_divide_over_the_ranks_of_a_sample_too() -> None:
    request = Request((LONG,), ("parallel.context=4",), ("parallel-layer=dense+context",))
    with pytest.raises(InputError, match=r"parallel.tensor=1 x parallel.context=4 x parallel.pipeline=1"):
        check_sizes(read_task(request, 6), 6)
    assert read_task(request, 8).split.data == 2
    assert read_task(request, 8).split.method == "ring"


def test_a_graph_that_is_compiled_holds_no_pieces() -> None:
    """Their messages are collectives, as those of tensor ranks are."""
    assert ModelSplit(context=2, one_graph="compile").no_graph
    assert not ModelSplit(context=2, one_graph="partial").no_graph
