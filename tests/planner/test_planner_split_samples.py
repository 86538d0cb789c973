"""Samples that ranks split: messages and memory beside what was measured, waits and links counted by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts import Pieces
from megatron_run.contracts.costs import AttentionCosts, FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run.contracts.topology import Axis, Sizes, Topology
from megatron_run.planning import resolve
from megatron_run_engine.estimate.step_memory import count_chunks
from megatron_run_model_deepseek.latent_attention import LatentShape
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.devices.transfers import all_reduce
from megatron_run_planner.layer_time import layer_operators, layer_time
from megatron_run_planner.layer_time.passes import joining_passes, layer_passes
from megatron_run_planner.memory import head_activations, layer_activations, least_memory, temporaries
from megatron_run_planner.split_samples import sent, waits
from megatron_run_planner.step_time import after_backward, message_time
from megatron_run_planner.task import read_task
from megatron_run_planner.workload import OPTIMIZERS, ModelSplit
from tests.support.checkout import ROOT

A100 = read_device("a100")
MEASURED = (ROOT / "benchmarks/results/context.md").read_text(encoding="utf-8")
WIDTHS = {"float32": 4, "bfloat16": 2}
METHODS = ("ring", "all_gather", "ulysses")


def rows(columns: int) -> Iterator[list[str]]:
    """The rows of the measured table of so many columns, without its head."""
    table = [line.strip("|\n").split("|") for line in MEASURED.splitlines() if line.count("|") == columns + 1]
    return ([cell.strip() for cell in row] for row in table[2:])


def benchmark_model(kv_heads: int, sequence: int, vocabulary: int = 256) -> ModelCosts:
    """That of the benchmark: two layers of eight heads and 128 features."""
    parts = AttentionCosts.plain(8, 16, kv_heads), FeedForwardCosts(512)
    return ModelCosts((LayerCosts(128, sequence, parts, dropout=False),) * 2, vocabulary, positions=sequence)


def test_a_rank_sends_the_bytes_that_were_counted() -> None:
    found = list(rows(7))
    assert {row[3] for row in found} == {*METHODS}
    for ranks, heads, dtype, method, counted, *_ in found:
        model = benchmark_model(int(heads.split()[0]), 512)
        split = ModelSplit(context=int(ranks), method=method, micro_batch=2)  # type: ignore[arg-type]  # one of its words
        assert sum(sent(model.layers[0], split, WIDTHS[dtype])) == int(counted.replace(",", ""))


def test_a_rank_holds_the_activations_that_were_measured() -> None:
    """Bytes for each further token of a sample, in fp32, where a value takes twice what it takes in 16 bits."""
    found = list(rows(8))
    assert {row[2] for row in found} == {"whole samples", *METHODS}
    for heads, ranks, method, held, *_ in found:
        word: Any = "ring" if method == "whole samples" else method
        split = ModelSplit(context=int(ranks), method=word)
        short, long = (benchmark_model(int(heads.split()[0]), length) for length in (1024, 2048))
        kept = [sum(layer_activations(layer, split) for layer in model.layers) for model in (short, long)]
        kept = [each + head_activations(model, split) for each, model in zip(kept, (short, long), strict=True)]
        assert 2 * (kept[1] - kept[0]) / 1024 == pytest.approx(int(held.replace(",", "")), rel=0.02)


def test_work_is_that_of_a_part_of_the_tokens_which_attend_to_all() -> None:
    layer = benchmark_model(4, 4096).layers[0]
    whole, part = (layer_operators(layer, 2, 1, context=ways) for ways in (1, 4))
    assert part.attention == whole.attention / 4 == 4 * 2 * 4096 * 4096 * 128 / 4
    assert [each.flops * 4 for each in part.products] == [each.flops for each in whole.products]
    assert [each.bytes * 4 for each in part.moved] == [each.bytes for each in whole.moved]
    passes = [list(layer_passes(layer, ModelSplit(context=ways), kernels=True)) for ways in (1, 4)]
    assert [each.forward * 4 for each in passes[1]] == [each.forward for each in passes[0]]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_keeps_and_takes_what_is_counted_in_it(method: Any, ranks: int) -> None:
    """One layer of a GPU's, rotated; but for ``ulysses`` its attention decides how much there is at most."""
    heads = 12 if ranks == 3 else 8
    sets: dict[str, Any] = {"model.num_layers": 1, "model.hidden_size": 128 * heads, "model.num_heads": heads}
    sets |= {"model.dropout": 0.0, "model.position": "rope", "data.vocab_size": 128, "train.precision": "bf16"}
    sets |= {"train.sequence_length": 1536, "parallel.context": ranks, "parallel-layer.method": method}
    texts = tuple(f"{key}={value}" for key, value in sets.items())
    request = Request(("preset:tiny",), texts, ("parallel-layer=dense+context",), nproc=ranks)
    (chunk,) = count_chunks(resolve(request), 0, {}, gpu=True)
    task = read_task(request, ranks)
    layers = task.model.kinds
    kept = layers.sum(lambda layer: layer_activations(layer, task.split)) + head_activations(task.model, task.split)
    assert kept == pytest.approx(chunk.kept, rel=0.005)
    if method != "ulysses":
        assert temporaries(task.model, task.split, layers, last=True) == pytest.approx(chunk.backward, rel=0.02)


def test_pieces_are_joined_pair_by_pair() -> None:
    """Each pair of pieces of which one sees the other, as a rank meets them: of its own and of all other ranks."""
    layer, ranks = benchmark_model(4, 4096).layers[0], 4
    pieces = [Pieces(index, ranks).columns(4096) for index in range(ranks)]
    pairs = {sum(keys.start <= queries.start for rank in pieces for queries in own for keys in rank) for own in pieces}
    assert pairs == {9}
    ((ahead, _, kernels, _),) = joining_passes(layer, ModelSplit(context=ranks, micro_batch=2))
    # Of each value of a pair's queries 34 bytes in the join, and 4 of those that are copied for the kernel.
    assert ahead == 9 * 2 * 4096 / 8 * (34 * 128 + 4 * (128 + 2 * 64))
    assert kernels % 9 == 0
    assert not list(joining_passes(layer, ModelSplit(micro_batch=2)))


def test_latents_travel_in_heads_of_the_size_of_keys() -> None:
    """Values of 24 features are padded to the 48 of keys."""
    latents = LatentShape(kv_rank=64, query_rank=None, rope=16, nope=32, value=24)
    layer = LayerCosts(256, 1024, (latents.costs(256, 8), FeedForwardCosts(512)))
    assert sent(layer, ModelSplit(context=2), 2)[0] == 1024 / 2 * 2 * 8 * 48 * 2
    assert sent(layer, ModelSplit(context=2, method="ulysses"), 2)[0] == 1024 / 2 * 4 * 8 * 48 * 2 / 2


def linked(bandwidth: float, **more: Any) -> Device:
    """A device with links of so many bytes a second and no latency, but for those that ``more`` describe."""
    links = {"bandwidth": bandwidth, "machine_bandwidth": bandwidth, "latency": 0.0, "machine_latency": 0.0}
    return A100.model_copy(update={"links": A100.links.model_copy(update={**links, "machine": 8, **more})})


#: Keys and values of a rank, of four: 1024 tokens of eight heads of 16 features, twice, in two bytes.
KEYS = 1024 * 8 * 16 * 2 * 2
#: Seconds that keys and values of a rank take to the next, method: seconds that a rank waits, forward and backward, for
#: attention of 4 s and 8 s, 1 and 2 a step. Gradients take twice as long, a rank's queries a half.
WAITS = {
    # 1/2 s beside 1 s, and 1/2 + 1 beside 2: the gradients of the last step travel alone.
    (0.5, "ring"): (0.0, 1.0),
    # 3 s beside three of 1 s; 3, 3, 3 + 6 and 6 beside four of 2 s, then 6 alone.
    (3.0, "ring"): (6.0, 1 + 1 + 7 + 4 + 6),
    # Three ranks' keys beside the first step, and their gradients alone.
    (0.5, "all_gather"): (0.5, 3.0),
    (3.0, "all_gather"): (8.0, 7 + 18),
    # 3/4 of queries, keys and values, and 3/4 of the result.
    (0.5, "ulysses"): (0.75, 0.75),
    (3.0, "ulysses"): (4.5, 4.5),
}


@pytest.mark.parametrize(("seconds", "method"), WAITS, ids=str)
def test_a_rank_waits_for_what_travels_longer_than_it_computes(seconds: float, method: Any) -> None:
    layer = benchmark_model(8, 4096).layers[0]
    found = waits(layer, ModelSplit(context=4, method=method), linked(KEYS / seconds), 4.0, 8.0)
    assert found == pytest.approx(WAITS[seconds, method])
    assert waits(layer, ModelSplit(method=method), linked(KEYS / seconds), 4.0, 8.0) == (0, 0)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_layer_waits_for_is_in_its_time(method: Any) -> None:
    """With links a thousandth as fast nothing hides: the difference is what is sent, and twice with recomputation."""
    layer, split = benchmark_model(8, 4096).layers[0], ModelSplit(context=4, method=method)
    fast, slow = linked(1e30), linked(1e3)
    one, two = (layer_time(layer, split, device) for device in (fast, slow))
    ahead, back = (each / 1e3 for each in sent(layer, split, 2))
    assert two.forward - one.forward == pytest.approx(ahead, rel=0.01)
    assert two.backward - one.backward == pytest.approx(back, rel=0.01)
    for recompute in ("core", "full"):
        again, quick = (layer_time(layer, replace(split, recompute=recompute), device) for device in (slow, fast))
        assert again.backward - quick.backward == pytest.approx(ahead + back, rel=0.01)


def test_nothing_hides_on_cores_that_ranks_share() -> None:
    layer, split, device = benchmark_model(8, 4096).layers[0], ModelSplit(context=4), read_device("cpu-2core")
    found = waits(layer, split, device, 1e9, 1e9)
    assert min(found) > 0
    assert found == waits(layer, split, device, 0.0, 0.0)


GRIDS = [
    Sizes(tensor=t, context=c, expert=e, data=d, pipeline=2)
    for t, c, e, d in product((1, 2, 8), (1, 2, 4, 16), (1, 2, 4), (1, 4, 8))
    if d % e == 0
]


def crosses(sizes: Sizes, axis: Axis, machine: int = 8) -> bool:
    return any(len({rank // machine for rank in group}) > 1 for group in Topology(sizes, 0).all_groups(axis))


def split_of(sizes: Sizes, **more: Any) -> ModelSplit:
    each = {name: getattr(sizes, name) for name in ("tensor", "context", "expert", "data", "pipeline")}
    return ModelSplit(**each, micro_batch=1, global_batch=16 * sizes.data, **more)


@pytest.mark.parametrize("method", METHODS)
def test_messages_leave_a_machine_where_their_ranks_do(method: Any) -> None:
    """In machines of eight, tensor ranks first, then those of a sample's pieces; between them nothing ever arrives."""
    layer = benchmark_model(256, 4096).layers[0]
    device = linked(1e30, machine_bandwidth=1e-30)
    for sizes in GRIDS:
        found = waits(layer, split_of(sizes, method=method), device, 1.0, 1.0)
        assert [each > 1e9 for each in found] == [crosses(sizes, "context")] * 2, sizes


def test_tokens_of_experts_leave_a_machine_where_their_ranks_do() -> None:
    """Copies of the model are as far from each other as ranks share each."""
    dense = benchmark_model(256, 4096).layers[0]
    layer = replace(dense, parts=(replace(dense.feeds[0], experts=8, top_k=2),))
    for sizes in GRIDS:
        seconds = layer_time(layer, split_of(sizes), linked(1e30, machine_bandwidth=1e-30)).forward
        assert (seconds > 1e9) is crosses(sizes, "expert"), sizes


def test_gradients_are_summed_over_all_ranks_that_have_the_weights() -> None:
    """Over as many, and by as many ways out of a machine, as there are; so are those of the experts of each."""
    for sizes in GRIDS:
        split = split_of(sizes)
        for axis, members, stride in (
            ("replicas", split.replicas, split.tensor),
            ("expert_replicas", split.replicas // split.expert, split.expert_stride(8)),
        ):
            peers = Topology(sizes, 0).peers(axis)  # type: ignore[arg-type]  # one of its words
            inside = sum(rank < 8 for rank in peers)
            links = linked(8e9, machine_bandwidth=1e9).links
            expected = 0.0 if len(peers) == 1 else 2 * (len(peers) - 1) / len(peers)
            expected /= 8.0 if inside == len(peers) else min(8.0, inside)
            assert all_reduce(links, 1e9, members, stride) == pytest.approx(expected), (sizes, axis)


def test_pieces_and_copies_reduce_and_shard_alike() -> None:
    """One group: two pieces of two copies take as long as four copies, and hold as much of the optimizer."""
    model, layout = benchmark_model(8, 4096), looped_layout(LayoutSpec(1, 1, 2))
    copies = ModelSplit(data=4, micro_batch=1, global_batch=8, optimizer="zero1")
    pieces = replace(copies, context=2, data=2)
    assert pieces.ranks == copies.ranks
    assert pieces.microbatches == 2 * copies.microbatches
    for optimizer in OPTIMIZERS:
        ways = [replace(each, optimizer=optimizer) for each in (copies, pieces)]
        assert after_backward(model, ways[0], A100, layout) == after_backward(model, ways[1], A100, layout)
        states = [least_memory(model, each).state for each in ways]
        assert states[0] == states[1]


def test_a_stage_is_as_far_away_as_it_has_ranks() -> None:
    model, device = benchmark_model(8, 4096), linked(1e30, machine_bandwidth=1e-30)
    for sizes in GRIDS:
        peers = Topology(sizes, 0).peers("pipeline")
        assert (message_time(model, split_of(sizes), device) > 1e9) is (peers[1] // 8 > 0), sizes
    whole, part = (message_time(model, ModelSplit(pipeline=2, context=ways), linked(1e9)) for ways in (1, 4))
    assert whole == 4 * part
