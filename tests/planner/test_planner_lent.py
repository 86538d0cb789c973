"""Plans with ``optimizer=zero3`` beside figures counted by hand: what is kept, lent and sent, and when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log2
from typing import Any

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts.costs import AttentionCosts, FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run.errors import InputError
from megatron_run.planning import resolve
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.devices.transfers import as_work
from megatron_run_planner.layer_time import Passes, embedding_time, head_time, layer_time, working_time
from megatron_run_planner.memory import rank_memory
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.schedules.for_task import find_for_task
from megatron_run_planner.search import Open, Search
from megatron_run_planner.step_time import after_backward, place_times
from megatron_run_planner.task import Task, read_task, sized, to_type, written
from megatron_run_planner.workload import Lending, ModelSplit, gpt2

GIB = 2**30
A100 = read_device("a100")
#: Llama 3 8B: 41.9 million weights of attention and 176.2 of an MLP in a layer, 525.3 in each table.
HIDDEN, LAYERS, WORDS = 4096, 32, 128256
ATTENTION, MLP, TABLE = HIDDEN * (HIDDEN + 2 * 1024 + HIDDEN), 3 * HIDDEN * 14336, WORDS * HIDDEN
_BLOCK = AttentionCosts.plain(32, 128, 8, rotary=True), FeedForwardCosts(14336, 3)
LLAMA = ModelCosts((LayerCosts(HIDDEN, 2048, _BLOCK, dropout=False, biased=False),) * LAYERS, WORDS, tied=False)
EIGHT = ModelSplit(data=8, micro_batch=1, global_batch=64, optimizer="zero3", gradient_bytes=4, recompute="full")


@pytest.fixture(scope="module")
def schedules() -> Schedules:
    return Schedules()


def a100(memory: float = 80, **links: float) -> Device:
    return A100.model_copy(update={"memory": memory * GIB, "links": A100.links.model_copy(update=links)})


@pytest.mark.parametrize(
    ("lending", "bytes_lent", "whole"),
    [
        (Lending(), 6 * (MLP + TABLE), 0),  # the last MLP and the head: weights of 2 bytes, gradients of 4
        (Lending(segments_held=3), 2 * (ATTENTION + MLP + TABLE) + 4 * (MLP + TABLE), 0),
        (Lending(segments_held=0), 4 * (MLP + TABLE), 2),
        (Lending(reduce="step"), 2 * (MLP + TABLE), 4),
        (Lending(segments_held=0, reduce="step"), 0, 6),
    ],
    ids=str,
)
def test_a_rank_keeps_its_share_and_two_segments(lending: Lending, bytes_lent: float, whole: float) -> None:
    weights = LAYERS * (ATTENTION + MLP) + 2 * TABLE
    assert LLAMA.weights == weights
    held = rank_memory(LLAMA, replace(EIGHT, lending=lending), LLAMA.kinds, [True, True], 1)
    assert held.lent == bytes_lent
    assert held.state == pytest.approx((18 / 8 + whole) * weights)


def test_parameters_below_a_size_stay_whole() -> None:
    """All but the tables and the MLPs: 18 bytes of a lent weight over 8 ranks, 6 and 12/8 of one that is not."""
    split = replace(EIGHT, lending=Lending(whole_below=50_000_000))
    held = rank_memory(LLAMA, split, LLAMA.kinds, [True, True], 1)
    # Of an MLP the gate and up projections are one parameter of 117 million values, the other has 59.
    assert held.state == pytest.approx(18 / 8 * (LAYERS * MLP + 2 * TABLE) + 7.5 * LAYERS * ATTENTION)
    assert held.lent == 6 * (MLP + TABLE)


def test_experts_are_shared_out_among_their_own_replicas() -> None:
    feed = FeedForwardCosts(4096, 2, experts=8, top_k=2)
    (dense,) = gpt2(1, 1024, 16, 256, 1).layers
    model = ModelCosts((replace(dense, parts=(dense.parts[0], feed)),) * 2, 1)
    attention, experts = 2 * 4 * 1024**2, 2 * 8 * 2 * 1024 * 4096
    for ranks, each in ((1, 18 / 4), (2, 18 / 2), (4, 18)):  # of each expert on a rank
        split = ModelSplit(data=4, expert=ranks, micro_batch=1, global_batch=4, optimizer="zero3")
        held = rank_memory(model, split, model.kinds, [False, False], 0)
        routers = 9 * 2 * 1024 * 8
        assert held.state == pytest.approx(18 / 4 * attention + routers + each * experts / ranks)
        assert held.lent == 6 * (attention / 2 + (experts / 2 / ranks if ranks < 4 else attention / 2))


def gathers(weights: Sequence[float], ranks: int, bandwidth: float, latency: float, width: float) -> float:
    """Seconds in which each of ``ranks`` gets what the others have of ``weights``, a message each."""
    return sum(latency * log2(ranks) + (ranks - 1) / ranks * width * each / bandwidth for each in weights)


def swept(weights: float, ranks: int) -> float:
    """Seconds in which gradients of 4 bytes are cleared, and a rank adds its share of them to that from before."""
    return (4 + 3 * 4 / ranks) * weights / (A100.bandwidth * A100.sweeps.efficiency)


@pytest.mark.parametrize("tensor", [1, 8])
def test_weights_travel_beside_the_work_of_a_layer(tensor: int) -> None:
    """In a machine, or between machines with one rank of each group in each."""
    split = replace(EIGHT, data=4, tensor=tensor, recompute="none")
    (layer,) = LLAMA.kinds.layers
    parts = [ATTENTION / tensor, MLP / tensor]
    fast = a100(bandwidth=1e18, machine_bandwidth=1e18)
    kept = working_time(layer, split, fast)
    cleared = kept.backward + swept(sum(parts), 4)
    assert layer_time(layer, split, fast) == pytest.approx((kept.forward, cleared, kept.weights))
    slow = a100(bandwidth=1e9, machine_bandwidth=1e8)
    links, bandwidth = slow.links, 1e9 if tensor == 1 else 1e8
    latency = links.latency if tensor == 1 else links.machine_latency
    ahead, reduced = (gathers(parts, 4, bandwidth, latency, width) for width in (2, 4))
    found = layer_time(layer, split, slow)
    assert found.forward == pytest.approx(ahead)
    assert found.backward == pytest.approx(ahead + reduced)
    assert found.weights == working_time(layer, split, slow).weights
    whole = layer_time(layer, replace(split, lending=Lending(0, "step")), slow)
    assert whole == working_time(layer, split, slow)
    late = layer_time(layer, replace(split, lending=Lending(segments_held=0)), slow)
    assert late.backward == pytest.approx(max(reduced, cleared))


def test_segments_at_the_turn_are_gathered_once() -> None:
    """The head, and with it the last MLP."""
    slow, split = a100(bandwidth=1e9), replace(EIGHT, data=8)
    layout = looped_layout(LayoutSpec(1, 1, LAYERS))
    (found,) = place_times(LLAMA, split, slow, layout)
    latency = slow.links.latency
    layers, tables = [ATTENTION, MLP] * LAYERS, [TABLE, TABLE]
    ahead, reduced = (gathers(layers + tables, 8, 1e9, latency, width) for width in (2, 4))
    load = slow.host.batch + slow.host.token * 2048
    assert found.forward == pytest.approx(ahead + load)
    assert found.backward == pytest.approx(ahead + reduced - gathers([MLP, TABLE], 8, 1e9, latency, 2))
    ends = embedding_time(LLAMA, split, slow), head_time(LLAMA, split, slow)
    assert ends[0].backward - ends[1].backward == pytest.approx(gathers([TABLE], 8, 1e9, latency, 2))


def test_on_cores_that_ranks_share_messages_add_to_the_work() -> None:
    device = read_device("cpu-2core")
    split = replace(EIGHT, data=2, recompute="none")
    (layer,) = LLAMA.kinds.layers
    work, found = working_time(layer, split, device), layer_time(layer, split, device)
    near = min(device.links.sums, key=lambda each: abs(log2(each.members / 2)) + abs(log2(each.ranks / 2)))
    sent = sum(near.latency + device.width / 2 * each / near.bandwidth for each in (ATTENTION, MLP))
    assert found.forward - work.forward == pytest.approx(as_work(sent, split, device))
    # A weight has 4 bytes here, as its gradient; that is cleared, and half of it read, read again and written.
    moved = (4 + 12 / 2) * (ATTENTION + MLP) / (device.bandwidth * device.sweeps.efficiency)
    assert found.backward - work.backward == pytest.approx(as_work(2 * sent, split, device) + moved)


@pytest.mark.parametrize(
    ("lending", "width"),
    [(Lending(), 0), (Lending(segments_held=0), 2), (Lending(reduce="step"), 4), (Lending(0, "step"), 6)],
    ids=str,
)
def test_what_stays_whole_travels_once_a_step(lending: Lending, width: float) -> None:
    """As a gather of 2 bytes a weight, and a reduction of 4."""
    device = a100(bandwidth=1e9, latency=0.0)
    found = after_backward(LLAMA, replace(EIGHT, lending=lending), device, looped_layout(LayoutSpec(1, 1, LAYERS)))
    assert found[1] == pytest.approx(7 / 8 * width * LLAMA.weights / 1e9)
    shared = after_backward(LLAMA, replace(EIGHT, optimizer="zero1"), device, looped_layout(LayoutSpec(1, 1, LAYERS)))
    assert found[0] == shared[0]


def test_eight_billion_parameters_fit_eight_small_devices_only_where_all_is_shared_out(schedules: Schedules) -> None:
    """Over links that are too slow for tensor ranks; the first of few stages has the table."""
    device = a100(24, machine=1)
    found = Search(LLAMA, 8, 64, device, schedules).run(keep=1000)
    assert {each.split.optimizer for each in found.best} == {"zero3"}
    assert all(each.needed <= 24 * GIB for each in found.best)
    with pytest.raises(InputError, match="over 8 x A100 80 GB fits: the smallest needs"):
        Search(LLAMA, 8, 64, device, schedules, left=Open(("adamw", "zero1"))).run()


def test_it_is_chosen_only_where_the_state_alone_does_not_do(schedules: Schedules) -> None:
    """With little memory it has larger microbatches, or spares recomputation; with much it sends more for nothing."""
    model = replace(LLAMA, layers=LLAMA.layers[:8], vocabulary=1000)
    little, much = (Search(model, 8, 64, a100(memory), schedules) for memory in (14, 80))
    best = little.run().best[0]
    assert best.split.lends
    assert little.judge(replace(best.split, optimizer="zero1"), best.schedule) is None
    assert not much.run().best[0].split.lends


def planned(*sets: str, plugins: tuple[str, ...] = ()) -> Task:
    model = {"use": "gpt", "num_layers": 8, "hidden_size": 1024, "num_heads": 8, "vocab_size": 1000}
    train = {"sequence_length": 256, "global_batch_size": 32, "steps": 100, "precision": "bf16"}
    data = {"use": "mock", "vocab_size": 1000}
    return read_task(Request(({"model": model, "train": train, "data": data},), sets, plugins), 4)


@pytest.mark.parametrize(
    ("plugins", "lending", "optimizers"),
    [
        ((), Lending(), ("adamw", "zero1", "zero3")),
        (("optimizer=zero3",), Lending(), ("adamw", "zero1", "zero3")),
        (("optimizer=zero3,segments_held=0,reduce=step,whole_below=1",), Lending(0, "step", 1), ("zero3",)),
        (("optimizer=deepspeed",), Lending(), ("adamw", "zero1")),
        (("graph-capture=partial",), Lending(), ("adamw", "zero1")),
        (("graph-capture=none",), Lending(), ("adamw", "zero1", "zero3")),
    ],
)
def test_a_configuration_says_what_is_lent_and_what_may_be_chosen(
    plugins: tuple[str, ...], lending: Lending, optimizers: tuple[str, ...]
) -> None:
    task = planned(plugins=plugins)
    assert task.split.lending == lending
    assert task.split.lends is any("zero3" in each for each in plugins)
    assert task.optimizers == optimizers


@pytest.mark.parametrize("plugins", [(), ("optimizer=zero3,segments_held=3",)])
def test_what_is_written_and_typed_lends(schedules: Schedules, tmp_path: Any, plugins: tuple[str, ...]) -> None:
    task = planned(plugins=plugins)
    device = a100(3.1)
    found = task.search(4, device, schedules).run(keep=1000)
    chosen = next(each for each in found.best if each.split.lends)
    assert chosen.split.lending == task.split.lending
    assert "optimizer=zero3" in to_type(task, chosen)
    file = tmp_path / "lent.yaml"
    file.write_text(written(task, chosen), encoding="utf-8")
    run = resolve(Request((str(file),)))
    assert run.one("optimizer").name == "zero3"
    again = read_task(Request((str(file),)), None).split
    assert (again.lends, again.lending) == (True, task.split.lending)


@pytest.mark.nightly
def test_a_schedule_that_is_found_fits_with_what_is_lent_and_what_the_head_keeps(schedules: Schedules) -> None:
    """Of each microbatch the last stage keeps logits; a hundredth is for what split backwards leave to their halves."""
    task = read_task(Request((sized(1.3e9),), ("parallel.pipeline=4",), ("optimizer=zero3",)), 8)
    device = read_device("a100-40")
    found = find_for_task(task, device, schedules, effort=2000).candidate
    assert found.split.lends
    assert found.needed <= 1.01 * device.memory


def test_one_replica_lends_nothing() -> None:
    split = replace(EIGHT, data=1, tensor=8)
    alone = replace(split, optimizer="adamw")
    assert not split.lends
    assert rank_memory(LLAMA, split, LLAMA.kinds, [True, True], 1) == rank_memory(
        LLAMA, alone, LLAMA.kinds, [True, True], 1
    )
    assert layer_time(LLAMA.layers[0], split, A100) == layer_time(LLAMA.layers[0], alone, A100)
    assert isinstance(layer_time(LLAMA.layers[0], split, A100), Passes)
