"""The hash of a run's files: all that they hold, read once on a machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_run.errors import DataError
from megatron_run_engine.data import file_hashes
from megatron_run_engine.data.file_hashes import hash_of
from megatron_run_engine.data.user_cache import YOUNG, user_cache

LENGTH = 4096


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some kibibytes are as large ones, and the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_hashes, "_PIECE", 64)
    monkeypatch.setattr(file_hashes, "_SMALL", 64)


@pytest.fixture
def file(tmp_path: Path, small: None) -> Path:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(number % 251 for number in range(LENGTH)))
    return path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was just written is old."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10 * YOUNG)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read."""
    found: list[Path] = []
    read = file_hashes._hash

    def counted(path: Path, size: int) -> str:
        found.append(path)
        return read(path, size)

    monkeypatch.setattr(file_hashes, "_hash", counted)
    return found


@pytest.mark.parametrize("place", [0, 63, 64, LENGTH // 2, LENGTH - 1])
def test_any_byte_makes_another_hash(file: Path, place: int) -> None:
    before = hash_of([file])
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert hash_of([file]) != before


def test_a_copy_has_the_same_hash_and_another_order_another(file: Path, tmp_path: Path) -> None:
    other, copy = tmp_path / "b.txt", tmp_path / "copy.txt"
    other.write_text("b")
    shutil.copy(file, copy)
    assert hash_of([file, other]) == hash_of([copy, other])
    assert hash_of([file, other]) != hash_of([other, file])
    assert hash_of([]) is None


def test_a_file_is_read_once_until_it_changes(file: Path, later: None, reads: list[Path]) -> None:
    assert len({hash_of([file]) for _ in range(3)}) == 1
    assert reads == [file]
    file.write_bytes(file.read_bytes()[::-1])
    hash_of([file])
    assert reads == [file] * 2


def test_a_file_that_may_change_unseen_is_read_again(file: Path, reads: list[Path]) -> None:
    hash_of([file])
    hash_of([file])
    assert reads == [file] * 2


def damaged(kept: Path) -> None:
    kept.write_bytes(b"\xff")


def unwritable(kept: Path) -> None:
    shutil.rmtree(kept.parent)
    kept.parent.write_text("no folder")


@pytest.mark.parametrize("spoil", [damaged, unwritable])
def test_a_spoilt_cache_is_not_believed(
    file: Path, later: None, reads: list[Path], spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hash_of([file])
    folder = user_cache("hashes")
    (kept,) = (path for path in folder.iterdir() if path.name != "lock")
    spoil(kept)
    assert hash_of([file]) == before
    assert len(reads) == 2


def test_of_a_large_file_pieces_are_read_its_first_and_last_among_them(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "WHOLE", 10 * 64)
    content = file.read_bytes()
    with file.open("rb") as opened:
        pieces = list(file_hashes._pieces(opened, LENGTH))
    assert len(pieces) == 10
    assert (pieces[0], pieces[-1]) == (content[:64], content[-64:])
    assert len({*pieces}) == 10


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt cannot be read: No such file"):
        hash_of([tmp_path / "gone.txt"])
