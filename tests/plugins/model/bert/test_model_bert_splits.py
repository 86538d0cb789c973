"""BERT in real runs: every split, schedule, recomputation and capture gives the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.config.request import Request
from tests.support.indexed_texts import write_texts
from tests.support.training import learned_alike, train_many

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
        (
            *("parallel.tensor=2", "parallel.pipeline=2", "graph-capture.capture_after=1"),
            "graph-capture.scope=embedding,attn,mlp,head,loss,order",
        ),
        ("parallel-layer=tensor", "schedule=1f1b", "graph-capture=partial"),
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("pairs") / "docs")


def request(corpus: Path, nproc: int, sets: tuple[str, ...], plugins: tuple[str, ...], order: str) -> Request:
    common = (
        *("model.use=bert", "model.head=pretraining", f"model.norm_order={order}"),
        *("data.use=sentence-pairs", f"data.paths={corpus}", "data.split=8,1,1"),
        *("train.steps=3", "eval.interval=3", "eval.batches=1"),
    )
    return Request(("preset:tiny",), (*common, *sets), plugins, nproc=nproc)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("pre", ["split sequences, chunks", "graphs"]),
        pytest.param("post", [*TOPOLOGIES], marks=pytest.mark.nightly),
        pytest.param(
            "pre", ["four stages", "split heads, zero bubble", "shards, recomputed"], marks=pytest.mark.nightly
        ),
    ],
    ids=["pre", "post, all", "pre, all"],
)
def test_every_topology_trains_as_one_process_does(corpus: Path, order: str, names: list[str]) -> None:
    found = train_many(4, [request(corpus, 4, *TOPOLOGIES[name], order) for name in names], timeout=550)
    (expected,) = train_many(1, [request(corpus, 1, (), (), order)], timeout=550)
    for seen in found:
        learned_alike(seen, expected[0])


@pytest.mark.multiproc
def test_ranks_that_share_weights_share_the_masks_of_what_each_computes_whole(corpus: Path) -> None:
    """The guard ends a run whose tensor-parallel ranks hold different copies of a replicated weight."""
    sets = ("parallel.tensor=2", "parallel.sequence=true", "model.dropout=0.3", "guard.replica_interval=1")
    asked = request(corpus, 2, sets, ("parallel-layer=tensor",), "pre")
    (ranks,) = train_many(2, [asked], timeout=120)
    assert len(ranks[0].losses) == 3


@pytest.mark.multiproc
def test_masks_of_dropout_follow_samples_and_layers_alone(corpus: Path) -> None:
    dropping = ("model.dropout=0.3",)
    (expected,), (plain,) = train_many(1, [request(corpus, 1, sets, (), "pre") for sets in (dropping, ())])
    assert abs(expected.losses[0] - plain.losses[0]) > 1e-3
    splits = {("parallel.pipeline=2",): ("schedule=1f1b",), ("parallel.data=2", "train.recompute=full"): ()}
    asked = [request(corpus, 2, (*dropping, *sets), plugins, "pre") for sets, plugins in splits.items()]
    for found in train_many(2, asked):
        learned_alike(found, expected)
