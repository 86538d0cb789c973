"""Operators, collectives and steps against published formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_run.contracts.costs import AttentionCosts, FeedForwardCosts, LayerCosts, ModelCosts, SegmentCosts
from megatron_run.contracts.schedule import LayoutSpec, Place, looped_layout
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.devices.transfers import all_reduce
from megatron_run_planner.layer_time import head_time, layer_operators, layer_time, mean_layer
from megatron_run_planner.memory import rank_memory
from megatron_run_planner.schedules import Schedules, spread
from megatron_run_planner.step_time import (
    after_backward,
    estimate,
    last_time,
    message_time,
    place_times,
    step_time,
)
from megatron_run_planner.workload import OPTIMIZERS, ModelSplit, gpt2, tables

A100 = read_device("a100")
#: GPT-3: Brown et al. 2020.
GPT3 = gpt2(96, 12288, 96, 2048, 51200)
#: 3.1 405B, Dubey et al. 2024, table 3.
_LLAMA = LayerCosts(16384, 8192, (AttentionCosts.plain(128, 128, 8), FeedForwardCosts(53248, 3)))
LLAMA = ModelCosts((_LLAMA,) * 126, 128256, tied=False)


def mixed(layer: LayerCosts) -> LayerCosts:
    """``layer`` with eight experts, of which a token chooses two."""
    attention, feed = layer.attentions[0], layer.feeds[0]
    return replace(layer, parts=(attention, replace(feed, experts=8, top_k=2)))


def test_parameters_are_those_of_the_papers() -> None:
    h, layers, vocabulary = GPT3.hidden, len(GPT3.layers), GPT3.vocabulary
    # Narayanan et al. 2021, equation 2, less biases, norms and positions.
    assert GPT3.weights == pytest.approx(12 * layers * h**2 * (1 + vocabulary / (12 * layers * h)), rel=1e-12)
    assert LLAMA.weights == pytest.approx(405.8e9, rel=1e-3)


def test_flops_are_those_of_the_paper() -> None:
    """Narayanan et al. 2021, equation 3 with 72 for 96: nothing is recomputed."""
    h, s, layers, vocabulary = GPT3.hidden, GPT3.sequence, len(GPT3.layers), GPT3.vocabulary
    expected = 72 * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    assert GPT3.flops_per_token * s == pytest.approx(expected)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("model", [GPT3, LLAMA], ids=["gpt3", "llama"])
def test_a_layers_operators_are_its_flops(model: ModelCosts, tensor: int) -> None:
    work = layer_operators(model.layers[0], 2, tensor)
    flops = sum(each.flops for each in work.products) + work.attention
    per_layer = (model.flops_per_token - 6 * model.hidden * model.vocabulary) / len(model.layers)
    assert flops * tensor == pytest.approx(per_layer / 3 * 2 * model.sequence)


#: Three layers that read 512 tokens, and five that write 128 and look at those.
_ATTENTION, _FEED = AttentionCosts.plain(16, 64), FeedForwardCosts(2816, 3)
_READS = LayerCosts(1024, 512, (_ATTENTION, _FEED))
_WRITES = LayerCosts(1024, 128, (_ATTENTION, AttentionCosts.over(512, 16, 64), _FEED))
T5 = ModelCosts((_READS,) * 3 + (_WRITES,) * 5, 32000, embedded=640)


@pytest.mark.parametrize("tensor", [1, 4])
def test_an_encoders_layers_read_its_own_text_and_the_others_look_at_it(tensor: int) -> None:
    work = [layer_operators(layer, 2, tensor) for layer in T5.layers]
    flops = sum(each.flops for one in work for each in one.products) + sum(one.attention for one in work)
    layers = T5.flops_per_token - 6 * T5.hidden * T5.vocabulary
    assert flops * tensor == pytest.approx(layers / 3 * 2 * T5.sequence)


def test_stages_of_an_encoder_and_of_a_decoder_have_their_own_times() -> None:
    split = ModelSplit(pipeline=2, micro_batch=1, global_batch=8)
    device = even(A100)
    layout = looped_layout(LayoutSpec(2, 1, 8, (3, 5)))
    first, second = place_times(replace(T5, vocabulary=1), split, device, layout)
    encoder, decoder = (layer_time(layer, split, device) for layer in (_READS, _WRITES))
    assert first.forward == pytest.approx(3 * encoder.forward, rel=0.05)
    assert second.forward == pytest.approx(5 * decoder.forward, rel=0.05)
    alone = ModelCosts((LayerCosts(1024, 128, (_ATTENTION, _FEED)),) * 8, 32000)
    assert message_time(T5, split, A100) > 2 * message_time(alone, split, A100) - A100.links.latency
    matrices = T5.hidden * 4 * T5.hidden
    assert T5.weights - alone.weights == pytest.approx(5 * matrices)


def test_experts_compute_what_their_tokens_choose() -> None:
    dense = gpt2(8, 1024, 16, 512, 32000).layers[0]
    mixture = mixed(dense)
    one = sum(each.flops for each in layer_operators(dense, 1, 1).products)
    two = sum(each.flops for each in layer_operators(mixture, 1, 1, 4).products)
    feed = 2 * 512 * 8 * 1024**2
    assert two - one == pytest.approx(feed)


def test_a_ring_sends_twice_what_its_neighbours_lack() -> None:
    links = A100.links.model_copy(update={"latency": 0.0, "machine_latency": 0.0})
    assert all_reduce(links, 1e9, 1) == 0
    assert all_reduce(links, 1e9, 4) == pytest.approx(2 * 3 / 4 * 1e9 / links.bandwidth)
    assert all_reduce(links, 1e9, 16, 8) == pytest.approx(2 * 15 / 16 * 1e9 / links.machine_bandwidth)
    # Four members in each machine share the way out, each by its own card.
    assert all_reduce(links, 1e9, 16, 2) == pytest.approx(2 * 15 / 16 * 1e9 / (4 * links.machine_bandwidth))


def even(device: Device) -> Device:
    """``device`` without whatever makes stages and messages unequal or free of work."""
    host = device.host.model_copy(update={"head": 0.0, "embedding": 0.0})
    links = device.links.model_copy(update={"latency": 0, "machine_latency": 0, "bandwidth": 1e30})
    return device.model_copy(update={"host": host, "links": links, "layers": ()})


@pytest.mark.parametrize(("kind", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize("microbatches", [4, 16])
def test_equal_stages_wait_as_the_formula_says(kind: str, chunks: int, microbatches: int) -> None:
    """Narayanan et al. 2021, section 2.2: the bubble is (p-1) / (v m) of the ideal time."""
    model = gpt2(16, 1024, 16, 256, 1)
    split = ModelSplit(pipeline=4, chunks=chunks, micro_batch=1, global_batch=microbatches)
    device = even(A100)
    plan = Schedules().plan(kind, 16, 4, chunks, microbatches)
    layer = layer_time(model.layers[0], split, device)
    ideal = microbatches * 4 * (layer.forward + layer.backward)
    found = step_time(model, split, device, plan)
    assert found.pipeline == pytest.approx(ideal * (1 + 3 / (chunks * microbatches)), rel=1e-3)
    assert found.waiting == pytest.approx(1 - ideal / found.pipeline, abs=1e-3)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_the_estimate_is_the_simulation_of_1f1b(pipeline: int) -> None:
    model = gpt2(24, 2048, 16, 1024, 51200)
    split = ModelSplit(tensor=1, pipeline=pipeline, data=2, micro_batch=2, global_batch=64)
    plan = Schedules().plan("1f1b", 24, pipeline, 1, split.microbatches)
    quick = estimate(model, split, A100, looped_layout(LayoutSpec(pipeline, 1, 24)))
    exact = step_time(model, split, A100, plan).seconds
    assert quick == pytest.approx(exact, rel=0.01)


def test_recomputing_a_layer_costs_its_forward() -> None:
    split = ModelSplit(tensor=2, micro_batch=4, global_batch=8)
    (layer, *_) = gpt2(96, 4096, 32, 2048, 51200).layers
    kept, full = (layer_time(layer, replace(split, recompute=how), A100) for how in ("none", "full"))
    assert full.backward == pytest.approx(kept.backward + kept.forward)
    core = layer_time(layer, replace(split, recompute="core"), A100)
    assert kept.backward < core.backward < full.backward


def test_tensor_ranks_share_a_message_when_they_scatter_it() -> None:
    whole = ModelSplit(tensor=8, pipeline=2, data=4, micro_batch=1, global_batch=8)
    parts = message_time(GPT3, replace(whole, scatter_messages=True), A100)
    latency = A100.links.machine_latency
    assert message_time(GPT3, whole, A100) - latency == pytest.approx(8 * (parts - latency))
    assert message_time(GPT3, replace(whole, pipeline=1), A100) == 0


def test_layers_that_do_not_divide_are_dealt_out() -> None:
    assert spread(10, 4) == (3, 3, 2, 2)
    plan = Schedules().plan("1f1b", 10, 4, 1, 4)
    assert [len(place.layers) for place in plan.layout] == [3, 3, 2, 2]


def test_the_stage_that_holds_most_is_waited_for() -> None:
    """Update and reduction are those of one stage's own layers, experts and tables, not of the average stage."""
    split = ModelSplit(pipeline=2, data=4, micro_batch=1, global_batch=16)
    dense = gpt2(1, 1024, 16, 256, 1).layers[0]
    expert = mixed(dense)
    model = ModelCosts((dense, dense, expert, expert), 1)
    experts = looped_layout(LayoutSpec(2, 1, 4, (2, 2)))
    spread_out = replace(model, layers=(dense, expert, dense, expert))
    update, reduction = after_backward(model, split, A100, experts)
    assert update > 1.6 * after_backward(spread_out, split, A100, experts)[0]
    most = after_backward(replace(model, layers=(expert,) * 4), split, A100, experts)
    assert (update, reduction) == pytest.approx(most)
    untied = replace(model, vocabulary=50000, tied=False)
    assert tables(untied, 1, first=True, last=True) == 2 * tables(untied, 1, first=True, last=False) == 2 * 50048 * 1024
    assert tables(replace(untied, tied=True), 1, first=True, last=True) == 50048 * 1024
    placed = replace(untied, positions=100)
    assert tables(placed, 4, first=True, last=False) == 50176 / 4 * 1024 + 100 * 1024, "every rank has all positions"


def test_a_tied_embedding_is_summed_by_the_stages_that_hold_it() -> None:
    """No stage between them waits for it, none does where one stage has both ends, and ``zero1`` sums a share."""
    model = gpt2(8, 1024, 16, 256, 1024)

    def reduction(stages: Sequence[int], counts: Sequence[int], **more: Any) -> float:
        layout = [
            Place(stage, index // 4, range(sum(counts[:index]), sum(counts[: index + 1])))
            for index, stage in enumerate(stages)
        ]
        split = ModelSplit(pipeline=max(stages) + 1, micro_batch=1, global_batch=16, **more)
        return after_backward(model, split, A100, layout)[1]

    table = 2 * 1024 * 1024
    assert reduction((0, 1, 2, 3), (2, 2, 2, 2)) == pytest.approx(all_reduce(A100.links, table, 2))
    assert reduction((0, 1, 2, 3), (0, 4, 4, 0)) == 0
    assert reduction((0, 1, 2, 3, 3, 2, 1, 0), (1,) * 8) == 0
    apart = [reduction((0, 1), (4, 4), data=4, optimizer=optimizer) for optimizer in OPTIMIZERS]
    more = all_reduce(A100.links, table, 2, 4) - all_reduce(A100.links, table / 4, 2, 4)
    assert apart[0] - apart[1] == pytest.approx(more)
    assert apart[2] == pytest.approx(all_reduce(A100.links, table / 4, 2, 4)), "zero3 has reduced all before"


def waiting(seconds: float) -> Device:
    """A device on which every sum in a machine takes so many seconds, whatever its size."""
    links = A100.links.model_copy(update={"latency": seconds, "bandwidth": 1e30})
    return A100.model_copy(update={"links": links})


def test_a_table_that_two_stages_hold_is_reduced_by_itself() -> None:
    """Layers and table over two copies of the model, then the table between the stages; one sum if untied."""
    model, split = gpt2(8, 1024, 16, 256, 1024), ModelSplit(pipeline=2, data=2, micro_batch=1, global_batch=16)
    layout = looped_layout(LayoutSpec(2, 1, 8, (4, 4)))
    assert after_backward(model, split, waiting(1.0), layout)[1] == pytest.approx(3)
    assert after_backward(replace(model, tied=False), split, waiting(1.0), layout)[1] == pytest.approx(1)


def test_a_loss_over_tensor_ranks_waits_for_two_small_sums_and_one_large() -> None:
    """A maximum and one sum in the forward (``nn.cross_entropy``), that of the input's gradient in the backward."""
    split = ModelSplit(tensor=2, micro_batch=1, global_batch=1)
    late, prompt = (head_time(GPT3, split, waiting(seconds)) for seconds in (1.0, 0.0))
    assert late.forward - prompt.forward == pytest.approx(2)
    assert late.backward - prompt.backward == pytest.approx(1)


@pytest.mark.parametrize("device", [A100, read_device("h200")], ids=["a100", "h200"])
@pytest.mark.parametrize(
    ("change", "slower", "larger"),
    [
        ({"logits": False}, False, False),
        ({"head_weights": 1e9}, True, True),
        ({"other_weights": 1e9}, False, True),
        ({"predictors": 1}, True, True),
        ({"positions": 100_000}, False, True),
        ({"tied": False}, False, True),
    ],
    ids=str,
)
def test_what_is_before_and_behind_the_layers_counts(
    device: Device, change: dict[str, Any], slower: bool, larger: bool
) -> None:
    """Each field of a model's costs is read: by the time of its last stage, or by the memory of its ends."""
    plain, split = gpt2(4, 1024, 16, 512, 50257), ModelSplit(micro_batch=1, global_batch=4)
    other = replace(plain, **change)
    times = [last_time(model, split, device) for model in (plain, other)]
    weights = [rank_memory(model, split, model.kinds, [True, True], 1).parameters for model in (plain, other)]
    assert (times[1].forward > times[0].forward) is slower
    assert (weights[1] > weights[0]) is larger
    if change == {"logits": False}:
        assert times[1].forward < times[0].forward
        assert rank_memory(other, split, other.kinds, [False, True], 1).parameters < weights[0]


def test_a_part_of_products_alone_has_no_kernels_besides() -> None:
    bare = SegmentCosts("gate", ((1024, 1024),), 0.0, kernels=0)
    model = replace(gpt2(2, 1024, 16, 512, 1000), layers=(LayerCosts(1024, 512, (bare,)),) * 2)
    split = ModelSplit(micro_batch=1, global_batch=4)
    assert mean_layer(model, split, A100).forward > 0
    assert mean_layer(model, split, read_device("h200")).forward > 0
    with pytest.raises(ValueError, match="below 0, or moves values without kernels"):
        replace(bare, moved=1.0)
    with pytest.raises(ValueError, match="a layer at least"):
        replace(model, layers=())
