"""Ranks save together or not at all; what was saved is never overwritten; a failure names the rank, path and reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_run.contracts.activity import Activity
from megatron_run.contracts.optimizer import StatePiece
from megatron_run.errors import CheckpointError, ExitCode
from megatron_run_engine.checkpoint.collectives import Ranks
from megatron_run_engine.checkpoint.files import FileSystem, NewFile, lock
from megatron_run_engine.checkpoint.saving import Saver
from megatron_run_engine.checkpoint.shard_file import split_into_files
from megatron_run_engine.checkpoint.step_folder import Checkpoints, verify_files
from megatron_run_engine.training.state.resuming import verify_share
from tests.support.saved_steps import (
    RUN,
    Alone,
    State,
    about,
    dealt,
    on_threads,
    random_state,
    read_all,
    same_state,
    save_alone,
    shapes_of,
)

STATE = random_state(1)


def save_on_threads(path: Path, state: State, world: int, files: Callable[[int], FileSystem]) -> list[object]:
    checkpoints, hands = Checkpoints(path), dealt(1, state, world)

    def save(ranks: Ranks) -> None:
        saver = Saver(checkpoints, ranks, RUN, files=files(ranks.rank))
        saver.save(about(1), hands[ranks.rank], shapes_of(state))

    return list(on_threads(world, save))


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_a_saved_step_is_there_whole_and_latest_names_it(tmp_path: Path) -> None:
    found = save_alone(tmp_path / "c", 7, STATE)
    assert same_state(read_all(found, 7), STATE)
    assert (found.steps(), found.newest(), found.hint()) == ([7], 7, 7)
    assert names(tmp_path / "c") == {"step7", "latest", ".lock"}
    assert names(found.folder(7)) == {"manifest.json", "rank-00000.safetensors"}


def test_writes_that_the_system_cuts_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals, quotas and network file systems may take less than they are given, without an error."""
    write, asked = os.write, list[int]()

    def half(handle: int, data: bytes | memoryview) -> int:
        asked.append(len(data))
        return write(handle, data[: -(-len(data) // 2)])

    monkeypatch.setattr(os, "write", half)
    found = save_alone(tmp_path / "c", 7, STATE)
    monkeypatch.undo()
    assert len(asked) > 8
    assert same_state(read_all(found, 7), STATE)


def test_what_is_said_of_a_step_comes_back(tmp_path: Path) -> None:
    said = about(7)
    back = save_alone(tmp_path / "c", 7, STATE).manifest(7).about
    assert back == said
    assert isinstance(back.scaler["good_steps"], int)
    assert isinstance(back.scaler["scale"], float)


@pytest.mark.parametrize("world", [2, 5])
def test_many_ranks_save_one_step(world: int, tmp_path: Path) -> None:
    assert save_on_threads(tmp_path / "c", STATE, world, lambda rank: FileSystem()) == [None] * world
    found = Checkpoints(tmp_path / "c")
    assert len(found.manifest(1).files) == world
    assert same_state(read_all(found, 1), STATE)


def test_a_rank_with_much_to_save_writes_several_files_of_about_one_length(tmp_path: Path) -> None:
    state = {f"w{index}": {"master": torch.rand(100 + index)} for index in range(20)}
    hands = dealt(1, state, 2)

    def save(ranks: Ranks) -> None:
        saver = Saver(Checkpoints(tmp_path / "c"), ranks, RUN, files_of_rank=2, at_once=2)
        saver.save(about(1), hands[ranks.rank], shapes_of(state))

    with mock.patch("megatron_run_engine.checkpoint.shard_file.LEAST", 1000):
        assert on_threads(2, save) == [None, None]
    found = Checkpoints(tmp_path / "c")
    files = found.manifest(1).files
    assert set(files) == {f"rank-0000{rank}{part}.safetensors" for rank in range(2) for part in ("", "-1")}
    for rank in range(2):
        one, other = (files[f"rank-0000{rank}{part}.safetensors"].bytes for part in ("", "-1"))
        assert abs(one - other) < 0.3 * max(one, other)
    assert same_state(read_all(found, 1), state)
    names, step = sorted(files), found.folder(1)
    content = bytearray((step / names[2]).read_bytes())
    content[-1] ^= 1
    (step / names[2]).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{names[2]} is damaged"):
        verify_files(step, found.manifest(1), names, threads=3)


def test_ranks_that_share_the_reading_of_a_step_read_every_file_once(tmp_path: Path) -> None:
    assert save_on_threads(tmp_path / "c", STATE, 3, lambda _: FileSystem()) == [None] * 3
    checkpoints = Checkpoints(tmp_path / "c")
    files = sorted(checkpoints.manifest(1).files)
    assert len(files) == 3
    for name in files:
        path = checkpoints.folder(1) / name
        sound = path.read_bytes()
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        found = on_threads(2, lambda ranks: verify_share(checkpoints, 1, ranks))
        assert [str(path) in str(each) for each in found if isinstance(each, CheckpointError)] == [True]
        path.write_bytes(sound)


def test_a_long_file_says_again_and_again_that_it_goes_on_when_it_is_written_and_when_it_is_read(
    tmp_path: Path,
) -> None:
    state, activity = {"w": {"master": torch.rand(10_000)}}, Activity()
    said: list[tuple[str, str]] = []
    activity.recorder = lambda step, name, detail: said.append((name, str(detail)))
    (pieces,) = dealt(0, state, 1)
    checkpoints = Checkpoints(tmp_path / "c")
    with mock.patch("megatron_run_engine.checkpoint.shard_file._BLOCK", 4096):
        Saver(checkpoints, Alone(), RUN, activity=activity).save(about(1), pieces, shapes_of(state))
    file = checkpoints.folder(1) / "rank-00000.safetensors"
    longest = 2 * 4096  # a stretch ends with the box that fills it
    assert said.count(("save-shard", f"step1/{file.name}")) > 1 + file.stat().st_size // longest
    read: list[int] = []
    with mock.patch("megatron_run_engine.checkpoint.files._BLOCK", 4096):
        verify_share(checkpoints, 1, Alone(), lambda: read.append(1))
    assert len(read) == -(-file.stat().st_size // 4096)


def test_no_two_waits_for_the_disk_follow_each_other_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk each may take most of the watchdog's limit. The fourth save removes a step."""
    real, activity = os.fsync, Activity()
    said: list[str] = []
    activity.recorder = lambda step, name, detail: said.append(name)

    def fsync(handle: int) -> None:
        said.append("fsync")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    saver = Saver(Checkpoints(tmp_path / "c"), Alone(), RUN, activity=activity)
    for step in range(1, 5):
        (pieces,) = dealt(step, STATE, 1)
        saver.save(about(step), pieces, shapes_of(STATE))
    assert said.count("fsync") > 4 * 4
    assert ("fsync", "fsync") not in set(pairwise(said)), said


def test_a_disk_is_waited_for_while_much_is_written_and_not_for_all_of_it_at_the_end(tmp_path: Path) -> None:
    with mock.patch("megatron_run_engine.checkpoint.files._SYNC", 1000), mock.patch("os.fsync") as sync:
        with FileSystem().create(tmp_path / "file") as file:
            for _ in range(50):
                file.write(bytes(99))
        assert sync.call_count == 4
        with FileSystem().create(tmp_path / "small") as file:
            file.write(bytes(999))
        assert sync.call_count == 4


@pytest.mark.parametrize(("sizes", "files"), [([], 1), ([10], 1), ([999, 1000], 1), ([1000, 1000], 2), ([400] * 20, 3)])
def test_no_file_is_made_for_little(sizes: list[int], files: int) -> None:
    pieces = [StatePiece(f"w{i}", "master", (0,), (n,), torch.zeros(n)) for i, n in enumerate(sizes)]
    with mock.patch("megatron_run_engine.checkpoint.shard_file.LEAST", 4000):
        hands = split_into_files(pieces, 3)
    assert len(hands) == files
    assert sorted(piece.name for hand in hands for piece in hand) == sorted(piece.name for piece in pieces)


class FullFile(NewFile):
    def write(self, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


class FullDisk(FileSystem):
    def create(self, path: Path) -> NewFile:
        return FullFile(path)


@pytest.mark.parametrize("full", [0, 1, 2])
def test_a_full_disk_on_one_rank_fails_all_and_keeps_the_last_step(full: int, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_alone(path, 0, STATE)
    ends = save_on_threads(path, STATE, 3, lambda rank: FullDisk() if rank == full else FileSystem())
    for end in ends:
        assert isinstance(end, CheckpointError)
        assert end.exit_code == ExitCode.DATA
        assert "No space left on device" in str(end)
        assert f"rank-{full:05d}.safetensors" in str(end)
        assert f"from rank {full}" in str(end)
    assert names(path) == {"step0", "latest", ".lock"}
    assert same_state(read_all(Checkpoints(path), 0), STATE)


def test_a_rank_whose_state_cannot_be_had_fails_all(tmp_path: Path) -> None:
    checkpoints, (pieces,) = Checkpoints(tmp_path / "c"), dealt(1, STATE, 1)

    def broken() -> object:
        yield pieces[0]
        raise ZeroDivisionError("the optimizer is broken")

    def save(ranks: Ranks) -> None:
        mine = broken() if ranks.rank else pieces
        Saver(checkpoints, ranks, RUN).save(about(1), mine, shapes_of(STATE))  # type: ignore[arg-type]

    ends = on_threads(2, save)
    assert all(isinstance(end, CheckpointError) and "ZeroDivisionError" in str(end) for end in ends)
    assert isinstance(ends[1], CheckpointError)
    assert isinstance(ends[1].__cause__, ZeroDivisionError)
    assert not checkpoints.steps()


def test_a_step_is_never_overwritten(tmp_path: Path) -> None:
    found = save_alone(tmp_path / "c", 7, STATE)
    with pytest.raises(CheckpointError, match="step7 exists: nothing is overwritten"):
        save_alone(tmp_path / "c", 7, random_state(2))
    assert same_state(read_all(found, 7), STATE)


def test_the_newest_whole_steps_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for step in (1, 2, 3):
        found = save_alone(path, step, STATE, keep=3)
    assert found.steps() == [1, 2, 3]
    (found.folder(2) / "manifest.json").write_bytes(b"{}")
    save_alone(path, 4, STATE, keep=2)
    assert found.steps() == [3, 4]
    (found.folder(4) / "rank-00000.safetensors").unlink()
    save_alone(path, 5, STATE, keep=2)
    assert found.steps() == [3, 4, 5], "step 4 is damaged, so step 3 is one of the two newest whole ones"


def test_no_manifest_is_read_while_there_are_not_more_steps_than_are_kept(tmp_path: Path) -> None:
    with mock.patch.object(Checkpoints, "looks_whole", side_effect=Checkpoints.looks_whole, autospec=True) as looks:
        for step in (1, 2):
            save_alone(tmp_path / "c", step, STATE, keep=2)
        looks.assert_not_called()
        found = save_alone(tmp_path / "c", 3, STATE, keep=2)
    assert found.steps() == [2, 3]
    assert looks.called


def test_fewer_than_two_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        save_alone(tmp_path / "c", 1, STATE, keep=1)


def test_what_killed_jobs_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for name in (".tmp-step1-other", ".del-step0-other", ".tmp-step2-other/deep"):
        (path / name).mkdir(parents=True)
        (path / name / "file").write_text("x")
    (path / "latest.tmp").write_text("half")
    (path / "mine.txt").write_text("kept")
    save_alone(path, 3, STATE)
    assert names(path) == {"step3", "latest", ".lock", "mine.txt"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept")
    (tmp_path / "c").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="is a symbolic link to"):
        save_alone(tmp_path / "c", 1, STATE)
    (tmp_path / "c").unlink()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / f".tmp-step1-{RUN}").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="File exists"):
        save_alone(tmp_path / "c", 1, STATE)
    assert names(elsewhere) == {"precious"}


@pytest.mark.parametrize("place", [".", "inner"])
def test_a_link_that_takes_a_folders_place_while_it_is_removed_costs_nobody_a_file(tmp_path: Path, place: str) -> None:
    """Who may write into a run folder swaps at the first removal, when the folder has been looked at."""
    home, old = tmp_path / "home", tmp_path / "old"
    (old / "inner").mkdir(parents=True)
    home.mkdir()
    for folder in (old, old / "inner", home):
        (folder / "a").touch()
        (folder / "precious").touch()
    swapped = old if place == "." else old / "inner"

    class Swapping(FileSystem):
        def unlink(self, path: Path, folder: int | None = None) -> None:
            if path == swapped / "a":
                swapped.rename(tmp_path / "aside")
                swapped.symlink_to(home)
            super().unlink(path, folder)

    with pytest.raises(OSError, match="Not a directory"):
        Swapping().remove_tree(old)
    assert names(home) == {"a", "precious"}


def test_two_jobs_do_not_save_at_once(tmp_path: Path) -> None:
    class Nested(FileSystem):
        def create(self, path: Path) -> NewFile:
            if path.suffix == ".safetensors":
                with pytest.raises(CheckpointError, match=f"by another job: run {RUN} holds"):
                    save_alone(tmp_path / "c", 2, STATE)
            return super().create(path)

    found = save_alone(tmp_path / "c", 1, STATE, files=Nested())
    assert same_state(read_all(found, 1), STATE)


class ReadOnly(FileSystem):
    def make_folder(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_a_read_only_disk_is_named_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        save_alone(tmp_path / "c", 1, STATE, files=ReadOnly())
    assert str(error.value).startswith(f"step 1 could not be saved: Read-only file system: {tmp_path / 'c'}")


def test_a_folder_that_vanishes_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save_alone(tmp_path / "gone" / "c", 1, STATE)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([StatePiece("w", "master", (0,), (3,), torch.zeros(3))], "1 of its 4 values are in no piece"),
        (
            [
                StatePiece("w", "master", (0,), (3,), torch.zeros(3)),
                StatePiece("w", "master", (2,), (2,), torch.zeros(2)),
            ],
            "hold the same values",
        ),
        ([StatePiece("w", "exp_avg", (0,), (4,), torch.zeros(4))], "w has no field master"),
        ([], "w has no field master"),
    ],
)
def test_a_state_with_gaps_is_not_committed(pieces: list[StatePiece], why: str, tmp_path: Path) -> None:
    saver = Saver(Checkpoints(tmp_path / "c"), Alone(), RUN)
    with pytest.raises(CheckpointError) as error:
        saver.save(about(1), pieces, {"w": (4,)})
    assert why in str(error.value)
    assert names(tmp_path / "c") == {".lock"}


def test_a_lock_whose_close_fails_is_no_failed_save(tmp_path: Path) -> None:
    close = os.close

    def closed_but(handle: int) -> None:
        close(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mock.patch.object(os, "close", closed_but), lock(tmp_path / "lock", "mine"):
        pass
    with lock(tmp_path / "lock", "mine again"):
        pass
