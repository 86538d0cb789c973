"""A run that saves behind its training: the same steps with the same bits, and never one that is half saved."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_run.contracts import CheckpointMetrics
from megatron_run.errors import CheckpointError, ExitCode
from megatron_run_engine.checkpoint.async_saver import AsyncSaver
from megatron_run_engine.checkpoint.files import FileSystem, NewFile
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.training.numbers import Progress
from megatron_run_engine.training.state.checkpointing import Checkpointing
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.resuming import SMALL, Attempt, attempt
from tests.support.saved_steps import read_all, same_state

#: fp16 with overflows, and a step saved after each.
SETS = {
    **SMALL,
    "train.steps": 6,
    "train.precision": "fp16",
    "scaler.initial_loss_scale": 2.0**22,
    "scaler.loss_scale_window": 2,
    "scaler.hysteresis": 1,
    "checkpoint.interval": 1,
    "checkpoint.keep": 9,
}
BEHIND = {**SETS, "checkpoint.async_save": True}


def at_the_first_write(path: Path, call: Callable[[], None]) -> Any:
    """A patch: ``call`` is called by whoever makes a shard in ``path``, before the file is there."""

    class Disk(FileSystem):
        def create(self, file: Path) -> NewFile:
            if file.suffix == ".safetensors":
                call()
            return super().create(file)

    return mock.patch("megatron_run_engine.checkpoint.saving.FileSystem", Disk)


def same_steps(one: Path, other: Path, steps: list[int]) -> None:
    found = [Checkpoints(folder / "checkpoints") for folder in (one, other)]
    assert [each.steps() for each in found] == [steps, steps]
    for step in steps:
        assert same_state(*(read_all(each, step) for each in found)), step
        saved = [each.manifest(step).about for each in found]
        assert (saved[0].counters, saved[0].scaler) == (saved[1].counters, saved[1].scaler)


def test_every_step_is_saved_as_it_was_though_training_goes_on_and_training_does_not_notice(tmp_path: Path) -> None:
    at_once, behind = attempt(tmp_path / "at once", SETS), attempt(tmp_path / "behind", BEHIND)
    assert behind.numbers == at_once.numbers
    assert any(numbers["skipped"] for numbers in at_once.numbers.values())
    assert behind.saved == at_once.saved == [1, 2, 3, 4, 5, 6]
    same_steps(tmp_path / "at once", tmp_path / "behind", [1, 2, 3, 4, 5, 6])


def test_steps_are_done_while_one_is_being_written_and_a_new_save_waits_for_it(tmp_path: Path) -> None:
    gate, done = threading.Event(), list[int]()

    def wait() -> None:
        assert gate.wait(10)

    def step_done(step: int) -> None:
        done.append(step)
        if step == 4:  # the save of step 4 is about to wait for that of step 2
            threading.Timer(0.2, gate.set).start()

    with at_the_first_write(tmp_path, wait):
        ran = attempt(tmp_path, {**BEHIND, "checkpoint.interval": 2}, each_step=step_done)
    assert done == [1, 2, 3, 4, 5, 6]
    assert ran.saved == [2, 4, 6]
    second = ran.times[1]
    assert second.seconds >= 0.19, "it waited"
    assert ran.times[0].write_seconds > ran.times[0].seconds
    assert ran.times[2].write_seconds == ran.times[2].seconds, "the last step is saved at once"


def test_a_run_that_is_stopped_ends_with_both_steps_on_the_disk(tmp_path: Path) -> None:
    gate = threading.Event()

    def wait() -> None:
        assert gate.wait(10)

    sets = {**BEHIND, "checkpoint.interval": 2}
    with at_the_first_write(tmp_path, wait):
        stopped = attempt(tmp_path, sets, stop_after=3, each_step=lambda step: gate.set() if step == 3 else None)
    assert (stopped.code, stopped.saved) == (ExitCode.SIGTERM, [2, 3])
    assert Checkpoints(tmp_path / "checkpoints").hint() == 3
    assert attempt(tmp_path, sets).first == 4


def test_an_error_elsewhere_waits_until_the_step_is_whole(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 3:
            threading.Timer(0.2, gate.set).start()
            raise KeyboardInterrupt

    gate = threading.Event()

    def wait() -> None:
        assert gate.wait(10)

    with at_the_first_write(tmp_path, wait), pytest.raises(KeyboardInterrupt):
        attempt(tmp_path, {**BEHIND, "checkpoint.interval": 2}, each_step=fail)
    found = Checkpoints(tmp_path / "checkpoints")
    assert (found.steps(), found.hint()) == ([2], 2)
    assert not [entry for entry in found.path.iterdir() if entry.name.startswith(".tmp")]


def test_a_disk_that_is_full_ends_the_run_at_the_next_step_with_path_and_reason(tmp_path: Path) -> None:
    done: list[int] = []

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-00000.safetensors")

    def step_done(step: int) -> None:
        done.append(step)
        for thread in threading.enumerate():
            if thread.name.startswith("save step"):
                thread.join(10)

    with at_the_first_write(tmp_path, full), pytest.raises(CheckpointError) as error:
        attempt(tmp_path, {**BEHIND, "checkpoint.interval": 2}, each_step=step_done)
    assert error.value.exit_code == ExitCode.DATA
    assert str(error.value).startswith(
        "step 2 could not be saved: No space left on device: rank-00000.safetensors; make room"
    )
    assert done == [1, 2, 3]


@pytest.mark.parametrize(
    ("where", "said", "bug"),
    [
        ("write_shard", "step 2 could not be saved: KeyError: 'w'", False),
        ("make_manifest", "a step could not be saved asynchronously: KeyError: 'w'", True),
    ],
)
def test_what_failed_in_saving_is_said_whole_when_something_else_ends_the_run(
    where: str, said: str, bug: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    broken = mock.patch(f"megatron_run_engine.checkpoint.saving.{where}", side_effect=KeyError("w"))
    with broken, pytest.raises(KeyboardInterrupt):
        attempt(tmp_path, {**BEHIND, "checkpoint.interval": 2}, each_step=stop)
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert record.message == said
    assert bool(record.exc_info) == bug, "the traceback is kept where this rank has it"


def train_behind(rank: int, world: int, folder: str) -> Attempt:
    """Two stages of two ranks, one late with its shard; then one with a full disk; then one that cannot read."""
    place = Path(folder)
    sets = {**BEHIND, "checkpoint.interval": 2, "parallel.pipeline": 2, "model.num_layers": 2}
    plugins = ("optimizer=zero1", "schedule=1f1b")
    opened = threading.Event()

    def be_late() -> None:
        opened.wait(0.3 * (rank == 1))

    with found_once(), at_the_first_write(place, be_late):
        ran = attempt(place / "slow", sets, plugins, rank=rank, world=world)
    ran.assembly = None

    def full() -> None:
        if rank == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the shard")

    with found_once(), at_the_first_write(place, full):
        try:
            attempt(place / "full", {**sets, "train.steps": 200}, plugins, rank=rank, world=world)
        except CheckpointError as error:
            ran.failures.append(str(error))

    read = Reader.read

    def unreadable(reader: Reader, name: str, *box: Any) -> Any:
        if rank == 1 and "attention" in name:
            raise CheckpointError("the file cannot be read", why="Input/output error")
        return read(reader, name, *box)

    with found_once(), mock.patch.object(Reader, "read", unreadable):
        try:
            attempt(place / "slow", sets, plugins, rank=rank, world=world)
        except CheckpointError as error:
            ran.failures.append(str(error))
    return ran


@pytest.mark.multiproc
def test_ranks_save_behind_their_training_and_fail_together_in_saving_and_in_loading(tmp_path: Path) -> None:
    ranks = run_ranks(train_behind, 4, str(tmp_path))
    assert ranks[0].saved == [2, 4, 6]
    found = Checkpoints(tmp_path / "slow" / "checkpoints")
    assert found.steps() == [2, 4, 6]
    assert [found.verify(step).about.step for step in found.steps()] == [2, 4, 6]
    for ran in ranks:
        full, unreadable = ran.failures
        assert "step 2 could not be saved: No space left on device: the shard (from rank 2)" in full
        assert unreadable == "the file cannot be read: Input/output error (from rank 1)"
    assert not Checkpoints(tmp_path / "full" / "checkpoints").steps()


def told_after_each_step(rank: int, world: int, folder: str) -> dict[int, list[int]]:
    """The steps that this rank learned of as saved, by the step after which; to rank 1 no save seems to end."""
    told: dict[int, list[int]] = {}
    after_step = Checkpointing.after_step

    def noted(self: Checkpointing, progress: Progress, last: int, *, stopping: bool) -> list[CheckpointMetrics]:
        found = after_step(self, progress, last, stopping=stopping)
        told[progress.step] = [metrics.step for metrics in found]
        return found

    def ended(_: AsyncSaver) -> bool:
        for thread in threading.enumerate():
            if thread.name.startswith("save step"):
                thread.join(10)
        return rank == 0

    with (
        found_once(),
        mock.patch.object(Checkpointing, "after_step", noted),
        mock.patch.object(AsyncSaver, "ended", property(ended)),
    ):
        attempt(Path(folder), {**BEHIND, "checkpoint.interval": 3}, rank=rank, world=world)
    return told


@pytest.mark.multiproc
def test_ranks_notice_together_that_a_step_is_saved(tmp_path: Path) -> None:
    """On one of them the end shows later than on another, and what follows it is collective."""
    together = {1: [], 2: [], 3: [], 4: [], 5: [], 6: [3, 6]}
    assert run_ranks(told_after_each_step, 2, str(tmp_path)) == [together, together]
