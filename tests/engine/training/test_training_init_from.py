"""``run.init_from``: the weights of another run or of an import, bit for bit on any ranks, and nothing else of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.formats.convert import read_step, write_folder
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.resuming import SMALL, Attempt, attempt
from tests.support.saved_steps import random_state, same_bits, save_alone

BASE = {**SMALL, "model.num_layers": 2, "data.vocab_size": 200, "train.steps": 2, "checkpoint.interval": 0}
#: Other data, another rate and other dropout: what the new run learns is its own.
NEW = {**BASE, "train.lr": 1e-4, "train.seed": 99, "model.dropout": 0.1}
#: By name: the axes that two ranks are split over, and the plugins that serve it.
SPLITS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "data": ({}, ("optimizer=zero1",)),
    "tensor": ({"parallel.tensor": 2}, ("parallel-layer=tensor",)),
    "pipeline": ({"parallel.pipeline": 2}, ("schedule=1f1b",)),
}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has taken two steps."""
    folder = tmp_path_factory.mktemp("first")
    attempt(folder, BASE)
    return folder


@pytest.fixture(scope="module")
def imported(first: Path) -> Path:
    """Its weights alone, as an import leaves them."""
    folder = first.parent / "imported"
    weights = read_step(Checkpoints(first / "checkpoints"), 2)
    write_folder(weights, folder, "test")
    return folder


def wrong_bits(source: Path, assembly: Any) -> list[str]:
    """What ``assembly`` holds that is not what was saved: masters, parameters, and moments that are not zero."""
    saved = Checkpoints(source / "checkpoints")
    reader, wrong = Reader(saved.folder(2), saved.manifest(2)), []
    for piece in assembly.optimizer.iter_state():
        if piece.field == "master" and not same_bits(piece.tensor, reader.read(*piece[:4])):
            wrong.append(piece.name)
        if piece.field != "master" and piece.tensor.any():
            wrong.append(f"{piece.field} of {piece.name}")
    for parameter, info in (item for described in assembly.infos for item in described.items()):
        for part in info.parts:
            rows = parameter.detach()[part.local.start : part.local.stop]
            starts = (part.start, part.column, 0)[: rows.ndim]
            if not same_bits(rows, reader.read(part.name, "master", starts, tuple(rows.shape)).to(rows.dtype)):
                wrong.append(f"parameter {part.name}")
    return wrong


def start(source: Path, folder: Path, sets: dict[str, Any], plugins: tuple[str, ...] = (), **more: Any) -> Attempt:
    """Start a run from ``source``, and see that it has its weights."""
    found: list[list[str]] = []
    asked = {**sets, "run.init_from": str(source)}
    started = attempt(folder, asked, plugins, loaded=lambda built: found.append(wrong_bits(source, built)), **more)
    assert found == [[]]
    return started


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_new_run_starts_from_the_weights_and_counts_from_its_own_first_step(
    precision: str, first: Path, tmp_path: Path
) -> None:
    started = start(first, tmp_path / "run", {**NEW, "train.precision": precision})
    assert list(started.numbers) == [1, 2]
    assert started.numbers[1]["lr"] <= 1e-4
    assert started.saved == [2]


def test_an_import_is_as_good_as_the_run(first: Path, imported: Path, tmp_path: Path) -> None:
    one, other = (start(source, tmp_path / source.name, NEW) for source in (first, imported))
    assert one.numbers == other.numbers
    step = attempt(
        tmp_path / "step",
        {**NEW, "model.use": "megatron-run-engine:gpt", "run.init_from": str(first / "checkpoints" / "step2")},
    )
    assert step.numbers == one.numbers


def test_a_rule_of_its_own_begins_by_itself_with_weights_from_elsewhere(first: Path, tmp_path: Path) -> None:
    """Rprop's first step is of a size that it chooses; with zeros as its state it would be next to nothing."""
    own = {**NEW, "optimizer.rule": "torch.optim:Rprop", "run.init_from": str(first)}
    begun: list[Any] = []
    attempt(tmp_path, own, loaded=lambda built: begun.extend(built.optimizer.iter_state()))
    assert {piece.field for piece in begun} == {"master"}, "nothing is there that the rule would take for its own"


def test_a_run_that_was_saved_goes_on_from_itself(first: Path, tmp_path: Path) -> None:
    start(first, tmp_path / "run", NEW, stop_after=1)
    resumed = attempt(tmp_path / "run", {**NEW, "run.init_from": str(tmp_path / "gone")}, number=2)
    assert resumed.first == 2
    again = attempt(tmp_path / "run", {**NEW, "run.init_from": str(first)}, number=3, resume="never")
    assert again.first == 1
    assert again.numbers[2] == resumed.numbers[2]


def start_unreadable(rank: int, world: int, source: str, folder: str) -> str:
    """What this rank says of weights that rank 1 cannot read while both bring them to each other."""
    read = Reader.read

    def unreadable(reader: Reader, name: str, *box: Any) -> Any:
        if rank == 1 and "attention" in name:
            raise CheckpointError("the file cannot be read", why="Input/output error")
        return read(reader, name, *box)

    with found_once(), mock.patch.object(Reader, "read", unreadable), pytest.raises(CheckpointError) as error:
        attempt(Path(folder), {**NEW, "run.init_from": source}, ("optimizer=zero1",), rank=rank, world=world)
    return str(error.value)


@pytest.mark.multiproc
def test_a_read_that_fails_on_one_rank_ends_all_of_them(imported: Path, tmp_path: Path) -> None:
    said = run_ranks(start_unreadable, 2, str(imported), str(tmp_path))
    assert said == ["the file cannot be read: Input/output error (from rank 1)"] * 2


def start_splits(rank: int, world: int, source: str, folder: str) -> list[Any]:
    """Each split in turn; the losses of its steps on rank 0."""
    found = []
    with found_once():
        for name, (axes, plugins) in SPLITS.items():
            sets = {**NEW, **axes, "model.dropout": 0.0}
            found.append(start(Path(source), Path(folder) / name, sets, plugins, rank=rank, world=world).numbers)
    return found


@pytest.mark.multiproc
def test_every_split_starts_from_the_same_bits(imported: Path, tmp_path: Path) -> None:
    ranks = run_ranks(start_splits, 2, str(imported), str(tmp_path))
    alone = attempt(tmp_path / "alone", {**NEW, "model.dropout": 0.0, "run.init_from": str(imported)}).numbers
    for numbers in ranks[0]:
        for step in (1, 2):
            assert numbers[step]["loss"] == pytest.approx(alone[step]["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("sets", "reasons"),
    [
        ({"model.num_layers": 1}, ["model.num_layers=2 there, 1 here"]),
        ({"model.num_heads": 4}, ["model.num_heads=2 there, 4 here"]),
        ({"model.activation": "gelu_tanh"}, ["model.activation=gelu there, gelu_tanh here"]),
        ({"model.ffn_size": 24}, ["layers.0.mlp.input.up.weight is [64, 16] there, [24, 16] here", "and 3 more"]),
        ({"train.sequence_length": 16}, ["embedding.position.weight is [8, 16] there, [16, 16] here"]),
        ({"data.vocab_size": 201}, ["embedding.word.weight is [200, 16] there, [201, 16] here"]),
        ({"model.tie_embeddings": False}, ["model.tie_embeddings=true there, false here"]),
    ],
)
def test_weights_of_another_model_are_refused(
    sets: dict[str, Any], reasons: list[str], first: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as error:
        attempt(tmp_path / "run", {**NEW, **sets, "run.init_from": str(first)})
    assert [reason for reason in reasons if reason not in str(error.value)] == []
    assert "set run.init_from" in str(error.value)


def test_weights_of_nothing_known_are_refused_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    save_alone(tmp_path / "other" / "checkpoints", 1, random_state(1))
    with pytest.raises(CheckpointError) as error:
        attempt(tmp_path / "run", {**NEW, "run.init_from": str(tmp_path / "other")})
    assert "embedding.position.weight is missing there, [8, 16] here" in str(error.value)


def test_what_the_weights_do_not_settle_may_differ_and_is_said(
    first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt(tmp_path / "run", {**NEW, "run.init_from": str(first)})
    assert f"weights of step 2 of {first}; model.dropout=0.0 there, 0.1 here" in caplog.text


def test_nothing_there_and_damage_are_named(imported: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoints in .*megatron-run import"):
        attempt(tmp_path / "run", {**NEW, "run.init_from": str(tmp_path)})
    shard = next((imported / "checkpoints" / "step2").glob("part-*"))
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=r"part-00000.safetensors is damaged"):
            attempt(tmp_path / "run", {**NEW, "run.init_from": str(imported)})
    finally:
        shard.write_bytes(content)


def test_where_the_newest_step_is_damaged_the_older_one_is_offered_to_start_from(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for step in (1, 2):
        saved = save_alone(tmp_path / "other" / "checkpoints", step, random_state(step))
    shard = saved.folder(2) / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged") as error:
        attempt(tmp_path / "run", {**NEW, "run.init_from": str(tmp_path / "other")})
    assert error.value.fix == f"to start from step 1: --set run.init_from={saved.folder(1)}"
