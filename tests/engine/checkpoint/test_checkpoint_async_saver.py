"""Saving in the background: what is saved are the values of the moment, all ranks or none, one step at a time."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from megatron_run.contracts.activity import Activity
from megatron_run.contracts.optimizer import StatePiece
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.async_saver import AsyncSaver, Staging
from megatron_run_engine.checkpoint.collectives import Ranks
from megatron_run_engine.checkpoint.files import FileSystem, NewFile
from megatron_run_engine.checkpoint.saving import Saver
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.support.saved_steps import (
    RUN,
    Alone,
    about,
    async_saver,
    dealt,
    on_threads,
    random_state,
    random_values,
    read_all,
    same_bits,
    same_state,
    save_async,
    shapes_of,
)

STATE = random_state(1, tensors=4)


class Gate(FileSystem):
    """A disk that makes a writer wait before it syncs the first file, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def create(self, path: Path) -> NewFile:
        self.reached.set()
        assert self.opened.wait(10)
        return super().create(path)


def test_the_values_that_are_saved_are_those_of_the_moment_whatever_the_next_step_does(tmp_path: Path) -> None:
    gate = Gate()
    saver = async_saver(tmp_path / "c", files=gate)
    save_async(saver, 3, STATE)  # changes every value before it returns
    assert gate.reached.wait(10)
    assert saver.busy
    assert not saver.ended
    found = Checkpoints(tmp_path / "c")
    assert (found.steps(), found.hint()) == ([], None), "nothing has its final name before it is on the disk"
    gate.opened.set()
    assert saver.wait().step == 3
    assert not saver.busy
    assert (found.steps(), found.hint()) == ([3], 3)
    assert same_state(read_all(found, 3), STATE)


def test_who_waits_for_a_save_says_what_its_thread_does(tmp_path: Path) -> None:
    gate, said = Gate(), list[tuple[int, str, str]]()
    training = Activity()
    training.step(5)
    training.enter("save", "step5")

    def hear(step: int, name: str, detail: object) -> None:
        said.append((step, name, str(detail)))
        if name == "save-shard":
            gate.opened.set()  # nothing else opens it

    activity = training.in_background()
    inner = Saver(Checkpoints(tmp_path / "c"), Alone(), RUN, files=gate, activity=activity)
    saver = AsyncSaver(inner, Staging(torch.device("cpu")), activity, training)
    save_async(saver, 3, STATE)
    assert gate.reached.wait(10)
    training.recorder = hear
    saver.wait()
    assert said[0] == (5, "save-shard", "step3/rank-00000.safetensors")
    assert said[-1] == (5, "save", "step5"), "what it does itself again"


def test_the_size_and_the_time_of_a_step_are_those_of_its_files(tmp_path: Path) -> None:
    saver = async_saver(tmp_path / "c")
    save_async(saver, 3, STATE)
    committed = saver.wait()
    assert committed.size == (tmp_path / "c" / "step3" / "rank-00000.safetensors").stat().st_size
    assert 0 < committed.seconds < 10


def test_one_copy_is_made_in_the_same_memory_again_and_again() -> None:
    staging = Staging(torch.device("cpu"))
    assert staging.bytes == 0
    addresses = []
    for seed in (1, 2):  # the same boxes with other values
        shapes = {name: tuple(fields["master"].shape) for name, fields in STATE.items()}
        draw = random.Random(seed)
        state = {name: {"master": random_values(draw, shape)} for name, shape in shapes.items()}
        (pieces,) = dealt(0, state, 1)
        copies = {copy[:4]: copy for copy in staging.copy(pieces)}
        assert len(copies) == len(pieces)
        assert all(same_bits(copies[piece[:4]].tensor, piece.tensor) for piece in pieces)
        addresses.append(min(copy.tensor.data_ptr() for copy in copies.values()))
        assert staging.bytes == sum(piece.tensor.nbytes for piece in pieces)
    assert len(set(addresses)) == 1


def test_memory_grows_when_there_is_more_to_copy() -> None:
    staging = Staging(torch.device("cpu"))
    for length in (3, 1000, 5):
        (copy,) = staging.copy([StatePiece("w", "master", (0,), (length,), torch.arange(float(length)))])
        assert torch.equal(copy.tensor, torch.arange(float(length)))
    assert staging.bytes == 4000


def test_ranks_meet_on_their_threads_and_a_failure_of_one_is_raised_by_all(tmp_path: Path) -> None:
    world, hands = 3, dealt(1, STATE, 3)

    class Full(FileSystem):
        def create(self, path: Path) -> NewFile:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def save(ranks: Ranks) -> int:
        for step, full in ((1, False), (2, True), (3, False)):
            files = Full() if full and ranks.rank == 1 else FileSystem()
            inner = Saver(Checkpoints(tmp_path / "c"), ranks, RUN, files=files)
            saver = AsyncSaver(inner, Staging(torch.device("cpu")))
            saver.start(about(step), hands[ranks.rank], shapes_of(STATE))
            if not full:
                saver.wait()
                continue
            with pytest.raises(CheckpointError, match=r"No space left on device: .*rank-00001.*\(from rank 1\)"):
                saver.wait()
        return ranks.rank

    assert on_threads(world, save) == [0, 1, 2]
    found = Checkpoints(tmp_path / "c")
    assert found.steps() == [1, 3]
    assert all(same_state(read_all(found, step), STATE) for step in (1, 3))


def test_a_copy_that_cannot_be_made_on_one_rank_fails_the_step_on_all(tmp_path: Path) -> None:
    hands = dealt(1, STATE, 2)

    def save(ranks: Ranks) -> None:
        def broken() -> object:
            yield hands[1][0]
            raise MemoryError("no pinned memory")

        mine = broken() if ranks.rank else hands[0]
        saver = AsyncSaver(Saver(Checkpoints(tmp_path / "c"), ranks, RUN), Staging(torch.device("cpu")))
        saver.start(about(1), mine, shapes_of(STATE))  # type: ignore[arg-type]
        saver.wait()

    for end in on_threads(2, save):
        assert isinstance(end, CheckpointError)
        assert str(end) == "step 1 could not be saved: MemoryError: no pinned memory (from rank 1)"
    assert not Checkpoints(tmp_path / "c").steps()


def test_after_a_failure_the_next_step_can_be_saved(tmp_path: Path) -> None:
    saver = async_saver(tmp_path / "gone" / "c")
    save_async(saver, 1, STATE)
    with pytest.raises(CheckpointError, match="step 1 could not be saved: No such file or directory"):
        saver.wait()
    (tmp_path / "gone").mkdir()
    save_async(saver, 2, STATE)
    saver.wait()
    assert same_state(read_all(Checkpoints(tmp_path / "gone" / "c"), 2), STATE)
