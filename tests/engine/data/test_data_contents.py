"""The hash of a run's files: all that they hold, read once on a machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megatron_run.errors import DataError
from megatron_run.files.user_cache import YOUNG, user_cache
from megatron_run_engine.data import contents
from megatron_run_engine.data.contents import contents_hash

LENGTH = 4096


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some kibibytes are as large ones, and the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "_PIECE", 64)


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
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that files were read."""
    found: list[int] = []
    read = contents._hash

    def counted(*arguments: Any) -> contents.Hashes:
        found.append(len(found))
        return read(*arguments)

    monkeypatch.setattr(contents, "_hash", counted)
    return found


@pytest.mark.parametrize("place", [0, 63, 64, LENGTH // 2, LENGTH - 1])
def test_any_byte_makes_another_hash(file: Path, place: int) -> None:
    before = contents_hash([file])
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert contents_hash([file]) != before


def test_a_copy_has_the_same_hash_and_another_order_another(file: Path, tmp_path: Path) -> None:
    other, copy = tmp_path / "b.txt", tmp_path / "copy.txt"
    other.write_text("b")
    shutil.copy(file, copy)
    assert contents_hash([file, other]) == contents_hash([copy, other])
    assert contents_hash([file, other]) != contents_hash([other, file])
    assert contents_hash([]) is None


def test_each_file_has_its_own_hash_from_the_cache_too(file: Path, tmp_path: Path, later: None) -> None:
    other = tmp_path / "b.txt"
    other.write_text("b")
    both = contents_hash([file, other])
    assert both is not None
    assert both == contents_hash([file, other]), "of the cache"
    assert both.each == tuple(xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in (file, other))


def test_a_file_is_read_once_until_it_changes(file: Path, later: None, reads: list[int]) -> None:
    assert len({contents_hash([file]) for _ in range(3)}) == 1
    assert len(reads) == 1
    file.write_bytes(file.read_bytes()[::-1])
    contents_hash([file])
    assert len(reads) == 2


def test_a_file_that_may_change_unseen_is_read_again(file: Path, reads: list[int]) -> None:
    contents_hash([file])
    contents_hash([file])
    assert len(reads) == 2


def damaged(kept: Path) -> None:
    kept.write_bytes(b"\xff")


def unwritable(kept: Path) -> None:
    shutil.rmtree(kept.parent)
    kept.parent.write_text("no folder")


@pytest.mark.parametrize("spoil", [damaged, unwritable])
def test_a_spoilt_cache_is_not_believed(
    file: Path, later: None, reads: list[int], spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents_hash([file])
    folder = user_cache("hashes")
    (kept,) = folder.glob("*.hash")
    spoil(kept)
    assert contents_hash([file]) == before
    assert len(reads) == 2


def test_of_a_large_file_pieces_are_read_its_first_and_last_among_them(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "WHOLE", 10 * 64)
    content = file.read_bytes()
    with file.open("rb") as opened:
        pieces = list(contents._pieces(opened, LENGTH))
    assert len(pieces) == 10
    assert (pieces[0], pieces[-1]) == (content[:64], content[-64:])
    assert len({*pieces}) == 10


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt cannot be read: No such file"):
        contents_hash([tmp_path / "gone.txt"])


def test_a_file_that_changes_while_it_is_read_is_read_again(
    file: Path, later: None, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    contents_hash([file], alive=lambda: file.write_bytes(b"other"))
    contents_hash([file])
    assert len(reads) == 2


def test_who_comes_later_waits_alive_and_does_not_read(file: Path, later: None, reads: list[int]) -> None:
    begun, begins = os.pipe()
    ended, ends = os.pipe()
    first = os.fork()
    if first == 0:  # reads until it is told to go on
        contents_hash([file], lambda: (os.write(begins, b"."), os.read(ended, 1)))
        os._exit(0)
    os.read(begun, 1)
    waited: list[int] = []

    def alive() -> None:
        if not waited:
            os.write(ends, b"." * 1000)
        waited.append(1)

    contents_hash([file], alive)
    os.waitpid(first, 0)
    for descriptor in (begun, begins, ended, ends):
        os.close(descriptor)
    assert (len(reads), bool(waited)) == (0, True)


def test_it_is_told_where_reading_takes_long(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    contents_hash([file], tell=lines.append)
    assert lines == []
    monkeypatch.setattr(contents, "_LONG", LENGTH - 1)
    file.write_bytes(file.read_bytes())
    contents_hash([file], tell=lines.append)
    assert len(lines) == 1
