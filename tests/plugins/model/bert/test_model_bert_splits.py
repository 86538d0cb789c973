"""BERT in real runs: every split, schedule, recomputation and capture gives the losses of one process.

Of two steps the second is replayed where graphs are captured, and the evaluation comes after its update.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_run.config.request import Request
from tests.support.indexed_texts import write_texts
from tests.support.training import Seen, learned_alike, train_many
from tests.support.training_bench import Bench, gradients_of_one_step

DROPOUT, GUARD = "model.dropout=0.3", "guard.replica_interval=1"
#: What makes graphs of all that has them.
GRAPHS = ("graph-capture.capture_after=1", "graph-capture.scope=embedding,attn,mlp,head,loss,order")
#: How each topology is asked for. The model has four layers.
TOPOLOGIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "four stages": (("parallel.pipeline=4",), ("schedule=1f1b",)),
    "split sequences, chunks": (
        ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.chunks=2"),
        ("parallel-layer=tensor", "schedule=interleaved"),
    ),
    "split heads, zero bubble": (
        ("parallel.tensor=2", "parallel.pipeline=2", "train.recompute=core_attn"),
        ("parallel-layer=tensor", "schedule=zero-bubble"),
    ),
    "shards, recomputed": (
        ("parallel.data=2", "parallel.pipeline=2", "train.recompute=full"),
        ("schedule=gpipe", "optimizer=zero1"),
    ),
    "graphs": (
        ("parallel.tensor=2", "parallel.pipeline=2", *GRAPHS),
        ("parallel-layer=tensor", "schedule=1f1b", "graph-capture=partial"),
    ),
    "graphs, split sequences, chunks": (
        ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.chunks=2", *GRAPHS),
        ("parallel-layer=tensor", "schedule=interleaved", "graph-capture=partial"),
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("pairs") / "docs")


def request(corpus: Path, nproc: int, sets: tuple[str, ...], plugins: tuple[str, ...], order: str) -> Request:
    common = (
        *("model.use=bert", "model.head=pretraining", f"model.norm.order={order}"),
        *("data.use=sentence-pairs", f"data.paths={corpus}", "data.split=8,1,1"),
        *("train.steps=2", "eval.interval=2", "eval.batches=1"),
    )
    return Request(("preset:tiny",), (*common, *sets), plugins, nproc=nproc)


#: Both kinds of split, messages within a stage, and a step as it is before and after graphs are captured.
FEW = ["graphs, split sequences, chunks"]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("pre", FEW),
        pytest.param("post", [*TOPOLOGIES], marks=pytest.mark.nightly),
        pytest.param("pre", [name for name in TOPOLOGIES if name not in FEW], marks=pytest.mark.nightly),
    ],
    ids=["pre", "post, all", "pre, all"],
)
def test_every_topology_trains_as_one_process_does(corpus: Path, order: str, names: list[str]) -> None:
    found = train_many(4, [request(corpus, 4, *TOPOLOGIES[name], order) for name in names], timeout=550)
    (expected,) = train_many(1, [request(corpus, 1, (), (), order)], timeout=550)
    for seen in found:
        learned_alike(seen, expected[0])


@pytest.fixture(scope="module")
def dropping(corpus: Path) -> dict[str, list[Seen]]:
    """By split of two ranks, what they saw with dropout.

    The guard ends a run whose tensor-parallel ranks hold different copies of a replicated weight.
    """
    asked: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "tensor": (("parallel.tensor=2", "parallel.sequence=true", GUARD), ("parallel-layer=tensor",)),
        "pipeline": (("parallel.pipeline=2",), ("schedule=1f1b",)),
        "data": (("parallel.data=2", "train.recompute=full"), ()),
    }
    requests = [request(corpus, 2, (DROPOUT, *sets), plugins, "pre") for sets, plugins in asked.values()]
    return dict(zip(asked, train_many(2, requests), strict=True))


@pytest.mark.multiproc
def test_ranks_that_share_weights_share_the_masks_of_what_each_computes_whole(dropping: dict[str, list[Seen]]) -> None:
    assert len(dropping["tensor"][0].losses) == 2


@pytest.mark.multiproc
def test_masks_of_dropout_follow_samples_and_layers_alone(corpus: Path, dropping: dict[str, list[Seen]]) -> None:
    (expected,), (plain,) = train_many(1, [request(corpus, 1, sets, (), "pre") for sets in ((DROPOUT,), ())])
    assert abs(expected.losses[0] - plain.losses[0]) > 1e-3
    for split in ("pipeline", "data"):
        learned_alike(dropping[split], expected)


def test_the_order_of_sentences_weighs_the_same_whatever_is_masked(corpus: Path, tmp_path: Path) -> None:
    """It is a mean over samples: a mean over the tokens that are masked leaves it as it is."""
    found = []
    for loss_mean in ("microbatch", "token"):
        words = request(corpus, 1, (f"train.loss_mean={loss_mean}", "train.clip_norm=0"), (), "pre").sets
        bench = Bench(
            tmp_path, *(word for word in words if not word.startswith(("train.steps", "eval."))), "train.steps=1"
        )
        found.append(gradients_of_one_step(bench, (0.9, 0.2, 0.6, 0.3))[0])
    orders = [name for name in found[0] if "order" in name or "pooler" in name]
    assert len(orders) > 2
    for name in orders:
        assert found[0][name].any()
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-4, atol=1e-6)
