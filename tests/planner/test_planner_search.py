"""The search finds what trying everything finds, keeps to the memory, and writes what a run can be started with."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts.costs import Divided
from megatron_run.errors import InputError, Problems, RunError
from megatron_run.planning import load_config, resolve
from megatron_run.planning.run import sections
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_planner.devices import read_device, shipped_devices
from megatron_run_planner.memory import head_activations, layer_activations, least_memory, stage_memory
from megatron_run_planner.schedules import Schedules, named, spread
from megatron_run_planner.search import GAIN, Candidate, Growth, Search
from megatron_run_planner.task import check_sizes, read_task, sized, to_type, written
from megatron_run_planner.workload import OPTIMIZERS, ModelSplit, Optimizer, gpt2

A100 = read_device("a100")
MODEL = gpt2(8, 2048, 16, 1024, 51200, flash=True)
GPT3 = gpt2(96, 12288, 96, 2048, 51200)
CONFIG = {
    "model": {"use": "gpt", "num_layers": 8, "hidden_size": 2048, "num_heads": 16, "vocab_size": 51200},
    "train": {"sequence_length": 1024, "global_batch_size": 32, "steps": 10, "precision": "bf16"},
    "data": {"use": "mock", "vocab_size": 51200},
}


@pytest.fixture(scope="module")
def schedules() -> Schedules:
    return Schedules()


def search(schedules: Schedules, memory: float = 80 * 2**30, ranks: int = 4) -> Search:
    return Search(MODEL, ranks, 32, A100.model_copy(update={"memory": memory}), schedules)


@pytest.mark.parametrize(("capture", "tensor"), [("partial", {1, 2, 4}), ("compile", {1})])
def test_a_step_that_is_one_graph_is_split_as_its_graph_allows(
    capture: str, tensor: set[int], schedules: Schedules
) -> None:
    found = Search(MODEL, 4, 32, A100, schedules, like=ModelSplit(one_graph=capture)).run(keep=1000)
    assert {each.split.pipeline for each in found.best} == {1}
    assert {each.split.tensor for each in found.best} == tensor
    assert {each.split.one_graph for each in found.best} == {capture}
    assert found.pruned["no graph of a step holds a pipeline"]


def test_a_batch_that_grows_divides_at_each_of_its_sizes(schedules: Schedules) -> None:
    """What is proposed is what a run takes: first batch and increment are dealt to the ranks as the whole is."""
    ramp = {"start": 4, "increment": 4, "samples": 100}
    task = read_task(Request(({**CONFIG, "train": {**CONFIG["train"], "ramp_up": ramp}},)), 8)
    found = Search(task.model, 8, 32, A100, schedules, task.growth).run(keep=1000)
    assert found.best
    assert found.pruned["train.ramp_up does not divide"]
    assert not any(4 % (each.split.micro_batch * each.split.data) for each in found.best)
    whole = Search(task.model, 8, 32, A100, schedules).run(keep=1000).best
    assert any(4 % (each.split.micro_batch * each.split.data) for each in whole)
    assert read_task(Request((CONFIG,)), 8).growth == Growth()


def test_a_schedule_takes_each_batch_of_those_that_grow(schedules: Schedules) -> None:
    """Interleaved wants whole groups of microbatches, and is the fastest here but for the batches before the last."""
    ramp = {"start": 8, "increment": 8, "samples": 100}
    task = read_task(Request(({**CONFIG, "train": {**CONFIG["train"], "ramp_up": ramp}},)), 8)
    assert task.growth == Growth((8, 8), (8, 16, 24))
    ends_early = {**CONFIG["train"], "steps": 6, "ramp_up": ramp}
    assert read_task(Request(({**CONFIG, "train": ends_early},)), 8).growth == Growth((8, 8), (8, 16))
    search = Search(task.model, 8, 32, A100, schedules, task.growth)
    found = search.run(keep=1000)
    assert all(takes(each, 8) and takes(each, 16) and takes(each, 24) for each in found.best)
    assert found.pruned["smaller batches refused by schedule interleaved"]
    other = [each for each in Search(task.model, 8, 32, A100, schedules).run(keep=1000).best if each not in found.best]
    refused = next(each for each in other if each.schedule == "interleaved" and dealt(each, 8))
    with pytest.raises(InputError, match="interleaved cannot run"):
        search.describe(refused.split, refused.schedule)


def dealt(candidate: Candidate, batch: int) -> bool:
    return batch % (candidate.split.micro_batch * candidate.split.data) == 0


def takes(candidate: Candidate, batch: int) -> bool:
    """Whether a run with a global batch of ``batch`` resolves with the schedule and split of ``candidate``."""
    split = candidate.split
    microbatches = batch // (split.micro_batch * split.data)
    return dealt(candidate, batch) and accepted(candidate.schedule, split.pipeline, split.chunks, microbatches)


@cache
def accepted(schedule: str, stages: int, chunks: int, microbatches: int) -> bool:
    sizes: dict[str, object] = {"parallel.pipeline": stages, "parallel.chunks": chunks, "parallel.data": 1}
    sizes |= {"train.micro_batch_size": 1, "train.global_batch_size": microbatches, "model.num_layers": 8}
    if 8 % (stages * chunks):
        sizes["parallel.layers"] = ",".join(map(str, spread(8, stages * chunks)))
    try:
        load_config("preset:tiny", sets=sizes, plugins=[f"schedule={schedule}".replace(" ", ",")], environment={})
    except RunError:
        return False
    return True


def everything(schedules: Schedules, ranks: int = 4) -> list[Candidate]:
    """Every split of powers of two under every schedule that takes it."""
    found = []
    for tensor, pipeline, micro_batch, recompute, optimizer in product(
        (1, 2, 4), (1, 2, 4), (1, 2, 4, 8, 16, 32), ("none", "mlp", "full"), OPTIMIZERS
    ):
        data = ranks // (tensor * pipeline)
        if data * tensor * pipeline != ranks or 32 % (micro_batch * data) or (optimizer != "adamw" and data == 1):
            continue
        for chunks, name in product((1, 2, 4, 8), schedules.names()):
            split = ModelSplit(
                tensor=tensor,
                pipeline=pipeline,
                chunks=chunks,
                data=data,
                micro_batch=micro_batch,
                global_batch=32,
                recompute=recompute,  # type: ignore[arg-type]  # one of its words
                sequence_parallel=tensor > 1,
                optimizer=optimizer,
                overlap=True,
                gradient_bytes=4,
            )
            if pipeline * chunks <= (len(MODEL.layers) if pipeline > 1 else 1) and (
                found_one := search(schedules).judge(split, name)
            ):
                found.append(found_one)
    return found


def test_the_best_is_the_best_of_all(schedules: Schedules) -> None:
    """Of ``zero3`` too, but for a gain that is not worth what it sends."""
    best, every = search(schedules).run().best[0].step.seconds, everything(schedules)
    assert best == pytest.approx(min(each.step.seconds for each in every if not each.split.lends), rel=1e-3)
    assert best <= min(each.step.seconds for each in every) / (1 - GAIN)


def test_the_best_come_first_and_all_fit(schedules: Schedules) -> None:
    memory = 8 * 2**30
    best = search(schedules, memory).run().best
    seconds = [each.step.seconds for each in best]
    assert seconds == sorted(seconds)
    assert all(each.needed <= memory for each in best)
    assert min(each.step.seconds for each in search(schedules).run().best) < seconds[0]


def test_every_schedule_that_serves_stages_is_tried(schedules: Schedules) -> None:
    """With little memory only pipelines are left."""
    found = search(schedules, 8 * 2**30).run(keep=1000)
    serving = {name for name in schedules.names() if "parallel.pipeline" in schedules.info(name).provides}
    assert {each.schedule for each in found.best if each.split.pipeline > 1} == serving


def test_what_is_left_out_is_counted(schedules: Schedules) -> None:
    found = search(schedules, 8 * 2**30).run()
    assert found.pruned["more memory than there is"] > 0
    assert found.tried > len(found.best)


def test_a_model_that_fits_nowhere_says_what_it_needs(schedules: Schedules) -> None:
    with pytest.raises(InputError, match=r"GiB of 2"):
        search(schedules, 2 * 2**30).run()


def test_shares_of_a_step_are_parts_of_it(schedules: Schedules) -> None:
    for each in search(schedules).run().best:
        assert all(share >= -1e-9 for share in each.shares.values())
        assert sum(each.shares.values()) < 1
        assert each.shares["waiting"] == pytest.approx(each.step.waiting * each.step.pipeline / each.step.seconds)


@pytest.mark.parametrize("tensor", [1, 8])
def test_a_layer_keeps_what_the_paper_says(tensor: int) -> None:
    """Korthikanti et al. 2022, table 2."""
    s, b, h, a = GPT3.sequence, 3, GPT3.hidden, 96
    scores = 5 * a * s / (h * tensor)

    def kept(**more: object) -> float:
        return layer_activations(GPT3.layers[0], ModelSplit(tensor=tensor, micro_batch=b, **more)) / (s * b * h)  # type: ignore[arg-type]

    assert kept() == pytest.approx(10 + 24 / tensor + scores)
    assert kept(sequence_parallel=True) == pytest.approx(34 / tensor + scores)
    assert kept(sequence_parallel=True, recompute="core") == pytest.approx(34 / tensor)
    assert kept(recompute="full") == 2


def test_in_flight_microbatches_are_held(schedules: Schedules) -> None:
    split = ModelSplit(pipeline=4, micro_batch=2, global_batch=32)
    stages = stage_memory(MODEL, split, schedules.plan("1f1b", 8, 4, 1, 16))
    layer = layer_activations(MODEL.layers[0], split)
    fields = 16 * 2 * MODEL.sequence * 20  # of a token, its label and its weight in all microbatches
    kept = [4 * 2 * layer + fields, 3 * 2 * layer, 2 * 2 * layer, 2 * layer + fields + head_activations(MODEL, split)]
    assert [each.activations for each in stages] == pytest.approx(kept)
    assert least_memory(MODEL, split).total == pytest.approx(stages[0].total)


@pytest.mark.parametrize(("optimizer", "each"), [("adamw", 18), ("zero1", 9), ("zero3", 4.5)])
def test_a_parameter_takes_as_many_bytes_as_the_optimizers_say(optimizer: Optimizer, each: float) -> None:
    """``--dry-run`` of a bf16 run over four copies says 18, 9 and 4.5 bytes a parameter."""
    held = least_memory(MODEL, ModelSplit(data=4, micro_batch=1, global_batch=4, optimizer=optimizer))
    state = held.parameters + held.gradients + held.optimizer
    assert state / MODEL.weights == pytest.approx(each)


def test_the_best_is_a_configuration_that_resolves(schedules: Schedules, tmp_path: Path) -> None:
    task = read_task(Request((CONFIG,)), 8)
    found = Search(task.model, 8, 32, A100.model_copy(update={"memory": 6 * 2**30}), schedules).run(keep=1000).best
    best = next(each for each in found if each.split.pipeline > 1 and each.split.tensor > 1)
    file = tmp_path / "best.yaml"
    file.write_text(written(task, best), encoding="utf-8")
    run = load_config(file, environment={})
    sizes, split = run.sizes, best.split
    assert (sizes.tensor, sizes.pipeline, sizes.data) == (split.tensor, split.pipeline, split.data)
    assert run.one("schedule").name == named(best.schedule)[0]
    assert run.config.train.micro_batch_size == split.micro_batch
    again = read_task(Request((str(file),)), None)
    assert again.split.ranks == 8
    assert again.model == task.model


LAYERS_22 = {**CONFIG, "model": {**CONFIG["model"], "num_layers": 22}}


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"parallel": {"first_stage_layers": 10, "tensor": 2, "pipeline": 2, "chunks": 2}},
        {"parallel": {"loss_as_layer": True, "embedding_as_layer": True, "sequence": True, "pipeline": 3}},
        {"parallel": {"layers": [12, 10], "pipeline": 2}, "optimizer": {"use": "deepspeed"}},
        {"parallel_layer": {"use": "dense+lora"}, "train": {**CONFIG["train"], "micro_batch_size": 2}},
    ],
)
def test_what_to_type_is_what_is_written(schedules: Schedules, tmp_path: Path, own: dict[str, object]) -> None:
    """Uneven layers, and keys of the configuration that another split must unset, included."""
    config = {**LAYERS_22, **own}
    task = read_task(Request((config,)), 8)
    found = Search(task.model, 8, 32, A100.model_copy(update={"memory": 9 * 2**30}), schedules).run(keep=1000).best[::3]
    assert {bool(each.uneven) for each in found} == {True, False}
    assert len({each.split.tensor for each in found}) > 1
    for number, each in enumerate(found):
        file = tmp_path / f"{number}.yaml"
        file.write_text(written(task, each), encoding="utf-8")
        spoken = resolve(Request((config,), sets=tuple(to_type(task, each)), nproc=8))
        filed = resolve(Request((str(file),)))
        assert spoken.layout == filed.layout
        assert sections(spoken) == sections(filed)


def test_segments_of_the_configuration_are_written_with_its_own_split(schedules: Schedules, tmp_path: Path) -> None:
    task = read_task(Request((CONFIG,), sets=("train.recompute=core_attn,mlp", "parallel.tensor=2")), 8)
    same = Search(task.model, 8, 32, A100, schedules).describe(task.split, task.schedule, task.counts)
    file = tmp_path / "same.yaml"
    file.write_text(written(task, same), encoding="utf-8")
    assert load_config(file, environment={}).config.train.recompute == ("core_attn", "mlp")
    assert "train.recompute=core_attn,mlp" in to_type(task, same)


def test_a_decoder_counts_what_the_engine_would_build() -> None:
    """28 layers of 3072 with heads of 256 and a gated layer of 24576 are Gemma 7B's, 8.5 billion with its embedding."""
    sizes = {"num_layers": 28, "hidden_size": 3072, "num_heads": 16, "head_size": 256, "ffn_size": 24576}
    model = {**sizes, "activation": "geglu_tanh", "vocab_size": 256000}
    task = read_task(Request(({"model": model, "train": CONFIG["train"]},)), 1)
    assert task.model.weights == pytest.approx(8.54e9, rel=0.01)


def test_what_the_user_chose_beside_the_split_is_written(schedules: Schedules) -> None:
    task = read_task(Request((CONFIG,), plugins=("parallel-layer=dense+lora", "optimizer=deepspeed")), 8)
    found = Search(task.model, 8, 32, A100, schedules).run(keep=1000).best
    text = written(task, next(each for each in found if each.split.tensor > 1))
    assert 'use: "tensor+lora"' in text
    assert "use: deepspeed" in text


def test_a_size_is_a_model_of_about_that_size() -> None:
    for wanted in (125e6, 350e6, 1.3e9, 7e9, 13e9, 70e9, 175e9, 405e9):
        task = read_task(Request((sized(wanted),)), 8)
        assert task.model.weights == pytest.approx(wanted, rel=0.1)
        assert task.model.hidden % task.model.layers[0].attentions[0].heads == 0


@pytest.mark.parametrize("wanted", [7e9, 30e9, 70e9, 405e9])
def test_a_size_that_needs_several_gpus_can_be_split_over_them(wanted: float) -> None:
    model = read_task(Request((sized(wanted),)), 8).model
    assert model.layers[0].attentions[0].heads % 8 == 0
    assert len(model.layers) % 4 == 0


@pytest.mark.parametrize("sets", [("parallel.tensor=3",), ("parallel.pipeline=16",), ("train.micro_batch_size=5",)])
def test_a_split_that_is_none_is_refused(sets: tuple[str, ...]) -> None:
    task = read_task(Request((CONFIG,), sets=sets), 16)
    with pytest.raises(InputError):
        check_sizes(task, 16)


@pytest.mark.parametrize(
    "sets",
    [
        ("parallel.tensor=4", "model.num_kv_heads=2"),
        ("parallel.tensor=4", "model.ffn_size=8190"),
        ("parallel.tensor=1", "model.experts.count=3", "parallel.expert=2"),
        ("parallel.tensor=2", "parallel.expert=2"),
    ],
)
def test_what_layers_refuse_when_they_are_built_the_planner_refuses_in_their_words(sets: tuple[str, ...]) -> None:
    task = read_task(Request((CONFIG,), sets=sets), 4)
    with pytest.raises(InputError) as refused:
        check_sizes(task, 4)
    with pytest.raises(RunError) as built:
        model_size(resolve(Request((CONFIG,), sets=sets, plugins=("parallel-layer=tensor",), nproc=4)))
    words = refused.value.what.split(" of the feed-forward")[0].removesuffix("features")
    assert words in built.value.what


def test_heads_that_do_not_split_are_not_searched(schedules: Schedules) -> None:
    grouped = replace(MODEL, divided=(Divided(2, "key-value heads"),))
    found = Search(grouped, 4, 32, A100, schedules).run(keep=1000)
    assert {each.split.tensor for each in found.best} == {1, 2}
    assert found.pruned["heads or features do not divide over tensor ranks"] > 0


def test_a_model_without_sizes_is_refused() -> None:
    with pytest.raises(Problems, match="hidden_size"):
        read_task(Request(({"model": {"num_layers": 2}, "train": CONFIG["train"]},)), 1)


@pytest.mark.parametrize("name", shipped_devices())
def test_every_shipped_device_is_read(name: str) -> None:
    device = read_device(name)
    assert device.peak > 1e11
    assert device.memory > 2**30
