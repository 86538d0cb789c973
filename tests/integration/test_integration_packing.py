"""Packed rows in real runs: every topology trains on the documents as one rank does that sees them alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_run.config.request import Request
from megatron_run.errors import RunError
from megatron_run.planning import resolve
from tests.support.training import learned_alike, train_many

#: How each topology is asked for. The model has four layers, of which stages in the middle have some.
TOPOLOGIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "four stages": (("parallel.pipeline=4",), ("schedule=1f1b",)),
    "split sequences, chunks": (
        ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.chunks=2"),
        ("parallel-layer=tensor", "schedule=interleaved"),
    ),
    "zero bubble, recomputed": (
        ("parallel.pipeline=2", "parallel.data=2", "train.recompute=full"),
        ("schedule=zero-bubble", "optimizer=zero1"),
    ),
    "experts on ranks, rotary": (
        (
            "parallel.expert=2",
            "parallel.tensor=2",
            "model.experts.count=4",
            "model.experts.aux_loss_coeff=0",
            "model.position=rope",
        ),
        ("parallel-layer=tensor",),
    ),
    "graphs": (
        ("parallel.pipeline=4", "graph-capture.scope=mlp,loss", "graph-capture.capture_after=1"),
        ("schedule=1f1b", "graph-capture=partial"),
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 2 to 60 bytes; rows have 32 tokens, so some are cut."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(0)
    for number in range(150):
        words = generator.integers(97, 123, generator.integers(2, 60), dtype=np.uint8)
        (folder / f"{number:03}.txt").write_bytes(bytes(words.tolist()))
    return folder


def request(texts: Path, nproc: int, sets: tuple[str, ...], plugins: tuple[str, ...]) -> Request:
    common = (f"data.paths={texts}", "data.packing=documents", "train.steps=3", "eval.interval=3", "eval.batches=1")
    return Request(("preset:tiny",), (*common, *sets), ("data=text", *plugins), nproc=nproc)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "names",
    [
        ["four stages"],
        pytest.param([*TOPOLOGIES][1:], marks=pytest.mark.nightly),
    ],
    ids=" and ".join,
)
def test_packed_rows_train_alike_in_every_topology(texts: Path, names: list[str]) -> None:
    found = train_many(4, [request(texts, 4, *TOPOLOGIES[name]) for name in names], timeout=550)
    alone = []
    for name in names:
        sets = tuple(word for word in TOPOLOGIES[name][0] if word.startswith("model."))
        alone.append(request(texts, 1, sets, ()))
    for seen, expected in zip(found, train_many(1, alone, timeout=550), strict=True):
        learned_alike(seen, expected[0])


def test_a_model_that_ignores_documents_is_refused(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_run_engine.builtin.model.gpt import Gpt
    from megatron_run_engine.estimate.model_size import model_size

    monkeypatch.setattr(Gpt, "fields", lambda self, position, layout: ("tokens", "labels", "loss_mask"))
    with pytest.raises(RunError, match="data=text packs documents, and attention of model=gpt would cross them"):
        model_size(resolve(request(texts, 1, (), ())))


def test_attention_of_packed_rows_is_not_captured(texts: Path) -> None:
    from megatron_run_engine.estimate.model_size import model_size

    asked = request(texts, 1, ("graph-capture.scope=attn",), ("graph-capture=partial",))
    with pytest.raises(RunError, match="segment attn of layer 0 cannot be captured"):
        model_size(resolve(asked))
