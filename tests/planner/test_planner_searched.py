"""Searched schedules: legal, within memory, optimal where every order can be tried, and run as any plugin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts.costs import AttentionCosts, FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.contracts.schedule import Action, LayoutSpec, ScheduleSpec
from megatron_run.errors import InputError
from megatron_run.pipeline.verify import verify
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run_planner.devices import read_device
from megatron_run_planner.memory import available, rank_memory
from megatron_run_planner.schedules import Schedules, spread
from megatron_run_planner.schedules.for_task import find_for_task, pipeline_of
from megatron_run_planner.schedules.places import Found, search_schedule
from megatron_run_planner.schedules.plugin_file import write_plugin
from megatron_run_planner.schedules.polish import makespan
from megatron_run_planner.schedules.workload_costs import Pipeline, Placed, Work
from megatron_run_planner.task import read_task, sized
from megatron_run_planner.workload import ModelSplit, gpt2
from megatron_run_schedule_zero_bubble import ZeroBubbleV
from tests.support.training import train

#: Layers of unequal halves of the backward, and ends that a layer does not balance; a byte each.
LAYER, EMBEDDING, HEAD = Work(1, 1.1, 0.9, 1, 1), Work(0.3, 0, 0.3, 0, 2), Work(2, 2, 2, 0, 2)


def pipeline(stages: int = 4, chunks: int = 2, microbatches: int = 8, memory: float = inf) -> Pipeline:
    return Pipeline((LAYER,) * 16, EMBEDDING, HEAD, stages, chunks, microbatches, 0.1, memory)


def folded(whole: Pipeline) -> tuple[Placed, list[list[Action]]]:
    """zb-v, with its even layers."""
    counts = tuple(spread(len(whole.layers), 2 * whole.stages))
    layout = ZeroBubbleV().layout(LayoutSpec(whole.stages, 2, len(whole.layers), counts))
    return whole.placed(layout), ZeroBubbleV().actions(ScheduleSpec(layout, whole.stages, 2, whole.microbatches))


def spent(placed: Placed, lists: Sequence[Sequence[Action]]) -> float:
    """Bytes of the fullest rank, counted action by action."""
    most = []
    for stage, actions in enumerate(lists):
        works = {place.chunk: placed.works[k] for k, place in enumerate(placed.layout) if place.stage == stage}
        held = [0.0]
        for op, _, chunk in actions:
            held.append(held[-1] + {"F": 1, "W": -1, "B": -1}.get(op, 0) * works[chunk].keeps)
        most.append(max(held) + sum(work.state for work in works.values()))
    return max(most)


def proven(found: Found) -> None:
    whole = found.placed.pipeline
    spec = ScheduleSpec(found.placed.layout, whole.stages, whole.chunks, whole.microbatches)
    assert verify(spec, found.lists).ascending
    assert makespan(found.placed, found.lists) == found.seconds
    assert found.seconds >= found.bound * (1 - 1e-9)


def test_uneven_stages_are_beaten_at_the_memory_of_zb_v() -> None:
    """A head of six layers' work: the fold leaves it where it is, and every other stage waits."""
    placed, lists = folded(pipeline())
    found = search_schedule(pipeline(memory=spent(placed, lists)), effort=600_000)
    proven(found)
    assert spent(found.placed, found.lists) <= spent(placed, lists)
    assert found.seconds < 0.85 * makespan(placed, lists)


def test_a_search_does_not_fall_behind_what_it_starts_from_and_repeats_itself() -> None:
    placed, lists = folded(pipeline())
    counts = [len(place.layers) for place in placed.layout]
    one, other = (
        search_schedule(pipeline(), counts, [(placed.layout, lists)], seed=3, effort=100_000) for _ in range(2)
    )
    proven(one)
    assert one.seconds <= makespan(placed, lists)
    assert [len(place.layers) for place in one.placed.layout] == counts
    assert one.lists == other.lists


def orders(microbatches: int) -> Iterator[list[Action]]:
    """Every order of one stage's actions in which microbatches keep theirs."""

    def after(done: tuple[int, int, int], actions: list[Action]) -> Iterator[list[Action]]:
        if done[2] == microbatches:
            yield actions
        for index, (op, open_) in enumerate(zip("FIW", (microbatches, *done), strict=False)):
            if done[index] < open_:
                ahead = (*done[:index], done[index] + 1, *done[index + 1 :])
                yield from after(ahead, [*actions, Action(op, done[index], 0)])  # type: ignore[arg-type]

    yield from after((0, 0, 0), [])


@pytest.mark.parametrize(("memory", "message"), [(inf, 0.0), (2.0, 0.3), (1.0, 0.0)])
def test_where_every_order_can_be_tried_the_best_is_found(memory: float, message: float) -> None:
    layers = (Work(1.3, 0.7, 0.4, 1), Work(0.6, 1.9, 1.1, 1))
    small = Pipeline(layers, Work(0.2, 0, 0.1), Work(0.3, 0.4, 0.2), 2, 1, 3, message, memory)
    found = search_schedule(small, effort=100_000)
    times = []
    for lists in product(orders(3), repeat=2):
        try:
            seconds = makespan(found.placed, lists)
        except ValueError:  # a deadlock
            continue
        if spent(found.placed, lists) <= memory:
            times.append(seconds)
    assert found.bound <= min(times) * (1 + 1e-9)
    assert found.seconds == pytest.approx(min(times))


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(InputError):
        search_schedule(pipeline(memory=3.0), effort=10_000)


def test_a_written_schedule_serves_every_number_of_microbatches(tmp_path: Path) -> None:
    found = search_schedule(pipeline(microbatches=4), effort=20_000)
    file = tmp_path / "mine.py"
    write_plugin(file, found.placed.layout, found.lists, 4, "A test.")
    made = load(choose(scan(), "schedule", str(file), "a test"), "a test").create()
    assert made.layout(LayoutSpec(4, 2, 16)) == found.placed.layout
    for microbatches in (1, 4, 9):
        spec = ScheduleSpec(made.layout(LayoutSpec(4, 2, 16)), 4, 2, microbatches)
        lists = made.actions(spec)
        assert verify(spec, lists).ascending
        if microbatches == 4:
            assert tuple(map(tuple, lists)) == found.lists


def test_a_task_gets_a_schedule_at_least_as_fast_as_the_installed_ones() -> None:
    sets = ("parallel.pipeline=4", "train.global_batch_size=8")
    task = read_task(Request((sized(350e6),), sets=sets), 4)
    device = read_device("a100-40")
    answer = find_for_task(task, device, Schedules(), effort=100_000)
    assert answer.candidate.needed <= device.memory
    assert answer.bound <= answer.candidate.step.seconds * (1 + 1e-9)
    assert answer.candidate.step.seconds < 0.97 * min(each.step.seconds for each in answer.fitting)


GPT = gpt2(32, 4096, 32, 2048, 51200, flash=True)
ROUTED = LayerCosts(4096, 2048, (AttentionCosts.plain(32, 128), FeedForwardCosts(2048, experts=8, top_k=2)))
ENDS = ([False, False], [True, False], [False, True], [True, True])


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (GPT, ModelSplit(8, 4, micro_batch=2, global_batch=64, recompute="full", sequence_parallel=True)),
        (GPT, ModelSplit(8, 4, chunks=2, data=2, micro_batch=2, global_batch=64, optimizer="zero1")),
        (ModelCosts((ROUTED,) * 8, 51200), ModelSplit(2, 4, data=4, expert=4, global_batch=64)),
        (ModelCosts((GPT.layers[0], ROUTED) * 4, 51200), ModelSplit(2, 4, data=4, expert=4, global_batch=64)),
    ],
    ids=["recomputed", "sharded", "experts", "two kinds"],
)
@pytest.mark.parametrize("ends", ENDS, ids=["inner", "first", "last", "both"])
def test_a_search_counts_buffers_once_and_state_by_layer(
    model: ModelCosts, split: ModelSplit, ends: list[bool]
) -> None:
    """What the layers of a rank leave of the memory is what the plan's own count leaves, before any microbatch."""
    device = read_device("a100-40")
    whole = pipeline_of(model, split, device)
    state = sum(layer.state for layer in whole.layers) + ends[0] * whole.before.state + ends[1] * whole.after.state
    state -= all(ends) * whole.shared
    held = rank_memory(model, split, model.kinds, ends, 0)
    assert whole.memory - state == pytest.approx(available(device.memory) - held.total, abs=1)
    layers = rank_memory(model, split, model.kinds, [False, False], 0)
    assert sum(layer.state for layer in whole.layers) == pytest.approx(
        layers.total - layers.temporaries - layers.communication
    )


@pytest.mark.multiproc
@pytest.mark.nightly
def test_a_written_schedule_trains_as_one_rank_does(tmp_path: Path) -> None:
    small = Pipeline((LAYER,) * 4, EMBEDDING, Work(1, 1, 1), 2, 2, 4)
    found = search_schedule(small, effort=20_000)
    file = tmp_path / "mine.py"
    write_plugin(file, found.placed.layout, found.lists, 4, "A test.")
    sets = ("train.steps=2", "model.num_layers=4", "train.micro_batch_size=2", "train.global_batch_size=8")
    alone = train(1, sets=sets)[0]
    ranks = train(2, sets=sets, plugins=(f"schedule={file}",))
    assert [seen.executed[0] for seen in ranks] == [[str(action) for action in actions] for actions in found.lists]
    assert ranks[0].losses == pytest.approx(alone.losses, rel=1e-5)
