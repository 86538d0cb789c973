"""Nobody but the user may put files where what lies there is read, mapped or executed."""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatron_run.files.user_cache import COMPILED, keep, keep_compiled
from megatron_run_engine.host.rank_environment import rank_environment


def test_no_library_is_loaded_from_a_folder_of_a_name_that_anybody_can_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own choice is one of the shared temporary folder, also once torch has written it into the variable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours, guessed = str(tmp_path / "megatron-run" / "inductor"), f"{tempfile.gettempdir()}/torchinductor_me"
    for before in ({}, {COMPILED: guessed}):
        assert rank_environment(before, 1, 1, 1)[COMPILED] == ours
    assert Path(ours).stat().st_mode & 0o77 == 0
    chosen = {COMPILED: str(tmp_path / "mine")}
    keep_compiled(chosen)
    assert chosen == {COMPILED: str(tmp_path / "mine")}


def test_a_cache_in_which_others_write_holds_nothing_that_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "megatron-run").mkdir()
    (tmp_path / "megatron-run").chmod(0o777)
    with pytest.raises(PermissionError):
        keep_compiled({})


def keep_often(kept: Path, rank: int, turn: Connection) -> None:
    """Keep the file once for each time that the other end of ``turn`` sends something."""
    while turn.recv():
        keep(kept, 1000 * str(rank).encode())
        turn.send(True)


def test_processes_that_keep_a_file_at_once_all_succeed(tmp_path: Path) -> None:
    """Every rank does so. A writer without the lock takes the others' half-written files for a killed one's."""
    context, kept = multiprocessing.get_context("fork"), tmp_path / "kept"
    pipes = [context.Pipe() for _ in range(4)]
    ranks = [context.Process(target=keep_often, args=(kept, rank, pipes[rank][1])) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for _ in range(20):
        for ours, _ in pipes:
            ours.send(True)
        assert all(ours.poll(60) and ours.recv() for ours, _ in pipes)
    for ours, _ in pipes:
        ours.send(False)
    for rank in ranks:
        rank.join(60)
    for pipe in pipes:
        for end in pipe:
            end.close()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert kept.read_text() in [1000 * str(rank) for rank in range(4)]


def test_what_is_kept_is_not_written_again_unless_it_is_damaged(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    keep(kept, b"content")
    first = kept.stat().st_ino
    keep(kept, b"content")
    assert kept.stat().st_ino == first
    kept.write_bytes(b"half")
    keep(kept, b"content")
    assert kept.read_bytes() == b"content"
