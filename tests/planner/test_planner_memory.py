"""The planner's closed form of a rank's memory beside what a dry run counts in the layers themselves, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from benchmarks.planner.configuration import FULL, HALF, SPLIT, Configuration, sized, stages
from benchmarks.planner.memory import planned_bytes
from megatron_run.planning import resolve
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.nn.parallel import rows_of_a_rank
from megatron_run_planner.memory import stage_memory
from megatron_run_planner.task import read_task
from megatron_run_planner.workload import Lending, rows_of_words

if TYPE_CHECKING:
    from megatron_run_engine.runtime.comm import ParallelGroup

BF16 = {"train.precision": "bf16", "model.dropout": 0.0}
#: Shapes of GPT-2's and Llama's layers: what a layer keeps, logits and state are of the same order.
GPT: dict[str, Any] = {**sized(768, 12, 1024, 8, 32), **BF16, "data.vocab_size": 50257}
LLAMA: dict[str, Any] = {
    **sized(1024, 8, 2048, 2, 8),
    **BF16,
    "data.vocab_size": 32000,
    "model.activation": "swiglu",
    "model.norm.kind": "rmsnorm",
    "model.position": "rope",
    "model.bias": "false",
    "model.num_kv_heads": 2,
    "model.ffn_size": 2048,
}
CORE, FEW_WORDS = {"train.recompute": "core_attn"}, {"data.vocab_size": 2000}
SEQUENCE = {"parallel.tensor": 2, "parallel.sequence": "true"}
PIPE = ("schedule=1f1b",)
#: Few words and key-value heads that ranks share out, so that the attention decides what a rank holds at most.
PIECES, GROUPED = GPT | FEW_WORDS, LLAMA | FEW_WORDS | {"model.num_kv_heads": 4}
PADDED = {"model.experts.capacity_factor": 1.0, "model.experts.pad_to_capacity": "true", "model.experts.top_k": 2}


def by(method: str, layers: str = "dense") -> str:
    """Layers whose pieces of samples meet by ``method``."""
    return f"parallel-layer={layers}+context,method={method}"


def over(ranks: int) -> dict[str, Any]:
    """Samples over so many ranks."""
    return {"parallel.context": ranks}


GRID = {
    "gpt": Configuration(1, (), GPT),
    "dropout": Configuration(1, (), GPT | {"model.dropout": 0.1}),
    "few words": Configuration(1, (), GPT | FEW_WORDS),
    "core recomputed": Configuration(1, (), GPT | CORE),
    "half recomputed": Configuration(1, (), GPT | FEW_WORDS | HALF),
    "all recomputed": Configuration(1, (), GPT | FEW_WORDS | FULL),
    "all recomputed, many words": Configuration(1, (), GPT | FULL),
    "a loss in chunks": Configuration(1, (), GPT | {"model.loss_chunks": 8}),
    "llama": Configuration(1, (), LLAMA),
    "llama, half recomputed": Configuration(1, (), LLAMA | HALF),
    "llama, all recomputed": Configuration(1, (), LLAMA | FULL),
    "untied": Configuration(1, (), GPT | {"model.tie_embeddings": "false"}),
    "dropless experts": Configuration(1, (), GPT | {"model.experts.count": 4, "model.experts.top_k": 2}),
    "experts": Configuration(1, (), GPT | PADDED | {"model.experts.count": 4}),
    "experts of llama": Configuration(1, (), LLAMA | PADDED | {"model.experts.count": 8}),
    "two tensor ranks": Configuration(2, (SPLIT,), GPT | {"parallel.tensor": 2}),
    "sequence parallel": Configuration(2, (SPLIT,), GPT | SEQUENCE),
    "sequence parallel llama": Configuration(2, (SPLIT,), LLAMA | SEQUENCE),
    "sequence parallel llama, all recomputed": Configuration(2, (SPLIT,), LLAMA | SEQUENCE | FULL),
    "two stages": Configuration(2, PIPE, GPT | stages(2)),
    "two stages, all recomputed": Configuration(2, PIPE, GPT | stages(2) | FULL),
    "two stages of llama, half recomputed": Configuration(2, PIPE, LLAMA | stages(2) | HALF),
    "four stages": Configuration(4, PIPE, GPT | stages(4) | {"train.global_batch_size": 64}),
    "two stages of two chunks": Configuration(2, ("schedule=interleaved",), GPT | stages(2, chunks=2)),
    "a split backward": Configuration(2, ("schedule=zero-bubble",), GPT | stages(2)),
    "sharded state": Configuration(2, ("optimizer=zero1",), GPT | {"parallel.data": 2}),
    "lent weights": Configuration(2, ("optimizer=zero3",), LLAMA | {"parallel.data": 2}),
    "stages of sequence parallel ranks": Configuration(4, (*PIPE, SPLIT), GPT | stages(2) | SEQUENCE),
    "a ring of two": Configuration(2, (by("ring"),), PIECES | over(2)),
    "a ring of four": Configuration(4, (by("ring"),), PIECES | over(4)),
    "a ring of three": Configuration(3, (by("ring"),), PIECES | over(3) | {"train.sequence_length": 1536}),
    "a ring of llama, all recomputed": Configuration(2, (by("ring"),), GROUPED | over(2) | FULL),
    "gathered keys of two": Configuration(2, (by("all_gather"),), PIECES | over(2) | HALF),
    "gathered keys of eight": Configuration(8, (by("all_gather"),), GROUPED | over(8)),
    "exchanged heads": Configuration(4, (by("ulysses"),), PIECES | over(4)),
    "exchanged heads of llama": Configuration(2, (by("ulysses"),), GROUPED | over(2) | HALF),
    "pieces, many words": Configuration(2, (by("ring"),), GPT | over(2)),
    "pieces of sequence parallel ranks": Configuration(4, (by("ring", "tensor"),), PIECES | SEQUENCE | over(2)),
    "pieces on two stages": Configuration(8, (*PIPE, by("ring")), PIECES | stages(2) | over(4)),
    "pieces on two stages of llama": Configuration(4, (*PIPE, by("all_gather")), GROUPED | stages(2) | over(2)),
    "pieces, a split backward": Configuration(8, ("schedule=zero-bubble", by("ring")), LLAMA | stages(2) | over(4)),
    "pieces, sharded state": Configuration(
        4, ("optimizer=zero1", by("ring")), PIECES | over(2) | {"parallel.data": 2, "train.global_batch_size": 64}
    ),
}

#: Runs whose weights are lent to segments: by kind of layers, by ranks, and by what is whole for how long.
LENT, COPIES = "optimizer=zero3", {"parallel.data": 2}
EXPERTS = PADDED | {"model.experts.count": 4}
LATENT = {"kv_rank": 128, "query_rank": 256, "rope_head_size": 32, "nope_head_size": 96, "value_head_size": 96}
MIXED = {"experts.count": 4, "experts.layer_first": 1, "experts.ffn_size": 512, "experts.shared.ffn_size": 512}
DEEPSEEK = {key: value for key, value in LLAMA.items() if key != "model.num_kv_heads"} | {
    f"model.{key}": value for key, value in (LATENT | MIXED).items()
}
LENDING = {
    "gpt": Configuration(2, (LENT,), GPT | COPIES),
    "llama, untied": Configuration(4, (LENT,), LLAMA | {"model.tie_embeddings": "false", "parallel.data": 4}),
    "three at a time": Configuration(2, (f"{LENT},segments_held=3",), GPT | FEW_WORDS | COPIES),
    "whole until the update": Configuration(2, (f"{LENT},segments_held=0,reduce=step",), GPT | COPIES),
    "whole weights": Configuration(2, (f"{LENT},segments_held=0",), GPT | FEW_WORDS | COPIES),
    "whole matrices": Configuration(2, (f"{LENT},whole_below=2000000",), GPT | FEW_WORDS | COPIES),
    "experts": Configuration(2, (LENT,), GPT | EXPERTS | COPIES),
    "experts of several ranks": Configuration(4, (LENT,), GPT | EXPERTS | {"parallel.data": 4, "parallel.expert": 2}),
    "experts without a replica": Configuration(2, (LENT,), GPT | EXPERTS | COPIES | {"parallel.expert": 2}),
    "deepseek": Configuration(2, (LENT, "model=deepseek"), DEEPSEEK | COPIES),
    "deepseek, a further token": Configuration(
        2, (LENT, "model=deepseek"), DEEPSEEK | COPIES | {"model.mtp_layers": 1}
    ),
    "two stages": Configuration(4, (*PIPE, LENT), GPT | stages(2) | COPIES),
    "two stages of two chunks": Configuration(4, ("schedule=interleaved", LENT), LLAMA | stages(2, chunks=2) | COPIES),
    "tensor ranks": Configuration(4, (SPLIT, LENT), GPT | SEQUENCE | COPIES),
    "pieces": Configuration(2, (LENT, by("ring")), PIECES | over(2)),
}

#: By night, since by day each choice has another case: the other layers, the other vocabulary, or more stages.
RARE = (
    "few words",
    "half recomputed",
    "all recomputed",
    "llama, half recomputed",
    "llama, all recomputed",
    "experts of llama",
    "sequence parallel",
    "sequence parallel llama",
    "sequence parallel llama, all recomputed",
    "two stages",
    "two stages, all recomputed",
    "a ring of two",
    "a ring of three",
    "a ring of four",
    "gathered keys of two",
    "gathered keys of eight",
    "exchanged heads of llama",
    "a ring of llama, all recomputed",
    "pieces, many words",
    "pieces, sharded state",
    "pieces, a split backward",
    "pieces on two stages of llama",
)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("words", [1, 128, 50257, 128256])
def test_tables_of_words_are_padded_as_layers_pad_them(words: int, tensor: int) -> None:
    peers = cast("ParallelGroup", SimpleNamespace(size=tensor))
    assert rows_of_words(words, tensor) == tensor * rows_of_a_rank(words, peers)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in RARE)) for name in GRID])
def test_a_rank_needs_what_a_dry_run_counts(name: str) -> None:
    request = GRID[name].request
    run, task = resolve(request), read_task(request, GRID[name].ranks)
    planned = [each.total for each in stage_memory(task.model, task.split, run.plans[max(run.plans)])]
    assert planned == pytest.approx(planned_bytes(request, gpu=True), rel=0.01)


@pytest.mark.parametrize("name", LENDING)
def test_what_is_kept_and_lent_is_what_the_optimizer_says(name: str) -> None:
    request = LENDING[name].request
    run, task = resolve(request), read_task(request, LENDING[name].ranks)
    planned = stage_memory(task.model, task.split, run.plans[max(run.plans)])
    counted = [stage.memory for stage in model_size(run).stages]
    assert [each.state + each.lent for each in planned] == pytest.approx(
        [sum(each.values()) for each in counted], rel=0.01
    )
    if task.split.lending == Lending():
        assert [each.lent for each in planned] == pytest.approx([each["lent"] for each in counted], rel=0.01)
