"""Any box of a logical tensor, however it was cut when it was saved, holds the bits that were saved."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.boxes import Box
from megatron_run_engine.checkpoint.collectives import Ranks
from megatron_run_engine.checkpoint.reader import Reader, TensorFile
from megatron_run_engine.checkpoint.saving import Saver
from megatron_run_engine.checkpoint.shard_file import DTYPES, read_header
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.support.saved_steps import (
    RUN,
    State,
    about,
    dealt,
    on_threads,
    random_state,
    random_values,
    read_all,
    same_bits,
    same_state,
    save_alone,
    shapes_of,
)


def saved(path: Path, state: State, world: int, seed: int = 0) -> Checkpoints:
    """``state`` in random boxes, saved by ``world`` ranks."""
    checkpoints, hands = Checkpoints(path), dealt(seed, state, world)

    def save(ranks: Ranks) -> None:
        Saver(checkpoints, ranks, RUN).save(about(1), hands[ranks.rank], shapes_of(state))

    assert on_threads(world, save) == [None] * world
    return checkpoints


@pytest.mark.parametrize("seed", range(8))
def test_random_boxes_equal_those_of_the_whole_tensors(seed: int, tmp_path: Path) -> None:
    state, draw = random_state(seed), random.Random(seed)
    checkpoints = saved(tmp_path / "c", state, world=1 + seed % 4, seed=seed)
    reader = Reader(checkpoints.folder(1), checkpoints.verify(1))
    for name, fields in state.items():
        assert reader.fields(name) == fields.keys()
        for field, values in fields.items():
            whole = Box((0,) * values.ndim, tuple(values.shape))
            for _ in range(20):
                starts = tuple(draw.randrange(size) for size in values.shape)
                sizes = tuple(draw.randint(1, size - start) for start, size in zip(starts, values.shape, strict=True))
                expected = values[Box(starts, sizes).within(whole)]
                assert same_bits(reader.read(name, field, starts, sizes), expected)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_type_keeps_its_bits(dtype: str, tmp_path: Path) -> None:
    values = random_values(random.Random(dtype), (5, 3), dtype)
    state = {"w": {"master": values, "other": torch.zeros(5, 3)}}
    assert same_state(read_all(saved(tmp_path / "c", state, world=2), 1), state)


def test_what_is_not_contiguous_is_saved_as_it_is_indexed(tmp_path: Path) -> None:
    values = random_values(random.Random(1), (4, 6))
    state = {"w": {"master": values.T}, "v": {"master": values[:, 2]}}
    assert same_state(read_all(save_alone(tmp_path / "c", 1, state), 1), state)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("layers.0.weigth", "master", (0,), (1,)), "did you mean 'layers.0.weight'?"),
        (("layers.0.weight", "exp_avg_sq", (0,), (1,)), "did you mean 'exp_avg'? it has"),
        (("layers.0.weight", "master", (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)), "do not fit the shape"),
        (("layers.0.weight", "step", (0,), (1,)), "do not fit the shape []"),
    ],
)
def test_what_was_not_saved_cannot_be_read_and_the_error_teaches(
    asked: tuple[str, str, tuple[int, ...], tuple[int, ...]], why: str, tmp_path: Path
) -> None:
    checkpoints = save_alone(tmp_path / "c", 1, random_state(1))
    reader = Reader(checkpoints.folder(1), checkpoints.manifest(1))
    with pytest.raises(CheckpointError) as error:
        reader.read(*asked)
    assert why in str(error.value)
    assert "step1" in str(error.value)


def test_a_file_is_opened_when_it_is_needed_and_not_before(tmp_path: Path) -> None:
    state = {"w": {"master": torch.arange(8.0)}}
    checkpoints = saved(tmp_path / "c", state, world=3, seed=3)
    manifest = checkpoints.verify(1)
    reader = Reader(checkpoints.folder(1), manifest)
    pieces = manifest.tensors["w"]["master"].pieces
    needed, others = pieces[0].file, {piece.file for piece in pieces[1:]} - {pieces[0].file}
    assert others, "another seed is needed"
    for name in others:
        (checkpoints.folder(1) / name).unlink()
    read = reader.read("w", "master", pieces[0].starts, pieces[0].sizes)
    assert torch.equal(read, state["w"]["master"][slice(pieces[0].starts[0], pieces[0].box.stops[0])]), needed


def test_a_file_that_is_removed_once_its_header_was_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_alone(tmp_path, 1, random_state(1)).folder(1) / "rank-00000.safetensors"
    header = read_header(path)

    def read_and_lose(path: Path) -> object:
        path.unlink()
        return header

    monkeypatch.setattr("megatron_run_engine.checkpoint.reader.read_header", read_and_lose)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors cannot be read: No such file"):
        TensorFile(path)
