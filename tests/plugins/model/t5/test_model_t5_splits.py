"""T5 in real runs: every split, schedule, recomputation and capture gives the losses of one process.

The encoder reads 48 tokens and the decoder 16. Of four layers two are the encoder's: on two stages the decoder begins
where a stage does, on three within one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.planning import resolve
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.estimate.step_memory import step_memory
from tests.support.indexed_texts import write_texts
from tests.support.training import learned_alike, train_many

#: How each topology is asked for.
TOPOLOGIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "four stages": (("parallel.pipeline=4",), ("schedule=1f1b",)),
    "border within a stage": (
        ("parallel.pipeline=2", "parallel.data=2", "model.encoder_layers=1"),
        ("schedule=1f1b", "optimizer=zero1"),
    ),
    "split sequences, chunks": (
        ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.chunks=2"),
        ("parallel-layer=tensor", "schedule=interleaved"),
    ),
    "split heads, shared messages, split backward": (
        ("parallel.tensor=2", "parallel.pipeline=2", "parallel.scatter_messages=true"),
        ("parallel-layer=tensor", "schedule=zero-bubble"),
    ),
    "a stage with both ends, split backward": (
        ("parallel.pipeline=2", "parallel.chunks=2", "parallel.data=2"),
        ("schedule=zero-bubble,variant=v",),
    ),
    "shards, recomputed": (
        ("parallel.data=2", "parallel.pipeline=2", "train.recompute=full"),
        ("schedule=gpipe", "optimizer=zero1"),
    ),
    "graphs": (
        (
            *("parallel.tensor=2", "parallel.pipeline=2", "graph-capture.capture_after=1"),
            "graph-capture.scope=embedding,attn,cross_attn,mlp,head,loss",
        ),
        ("parallel-layer=tensor", "schedule=1f1b", "graph-capture=partial"),
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "docs")


def request(corpus: Path, nproc: int, sets: tuple[str, ...], plugins: tuple[str, ...]) -> Request:
    common = (
        *("model.use=t5", "model.head_size=8", "model.encoder_length=48", "train.sequence_length=16"),
        *("data.use=span-corruption", f"data.paths={corpus}", "data.split=8,1,1", "data.encoder_length=48"),
        *("train.steps=2", "eval.interval=2", "eval.batches=1"),  # after the update of a step that is replayed
    )
    return Request(("preset:tiny",), (*common, *sets), plugins, nproc=nproc)


#: The border between the two, both kinds of split, and messages within a stage.
FEW = ["split sequences, chunks"]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "names",
    [FEW, pytest.param([name for name in TOPOLOGIES if name not in FEW], marks=pytest.mark.nightly)],
    ids=["few", "others"],
)
def test_every_topology_trains_as_one_process_does(corpus: Path, names: list[str]) -> None:
    asked = [(request(corpus, 4, *TOPOLOGIES[name]), _layers(*TOPOLOGIES[name])) for name in names]
    runs = train_many(4, [each for each, _ in asked], timeout=550)
    alone = sorted({layers for _, layers in asked})
    singles = train_many(1, [request(corpus, 1, layers, ()) for layers in alone], timeout=550)
    expected = dict(zip(alone, (ranks[0] for ranks in singles), strict=True))
    for found, (_, layers) in zip(runs, asked, strict=True):
        learned_alike(found, expected[layers])


def test_a_dry_run_counts_all_that_crosses_and_what_a_stage_only_hands_on(corpus: Path) -> None:
    """The first stage of four has an encoder layer, the second too, and holds the decoder's stream for it."""
    run = resolve(request(corpus, 4, ("parallel.pipeline=4", "train.micro_batch_size=2"), ("schedule=1f1b",)))
    size, held = model_size(run), step_memory(run)
    assert size.beside == 4 * (48 * 2 * 32 + 2 * 32 * 2)
    longer = request(corpus, 4, ("parallel.pipeline=4", "train.micro_batch_size=2"), ("schedule=1f1b",))
    longer = replace(longer, sets=tuple(each.replace("length=16", "length=20") for each in longer.sets))
    more = step_memory(resolve(longer))
    assert held is not None
    assert more is not None
    # Of each microbatch in flight, three on the second stage, four more tokens of 32 features in two rows.
    assert more[1]["activations"] - held[1]["activations"] == 3 * 4 * (4 * 2 * 32)


def _layers(sets: tuple[str, ...], _: tuple[str, ...]) -> tuple[str, ...]:
    """What of a topology changes the model."""
    return tuple(each for each in sets if each.startswith("model."))
