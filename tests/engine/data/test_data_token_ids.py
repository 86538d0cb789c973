"""Ids outside of a vocabulary are found wherever they lie, before anything reads a sample."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_run.errors import DataError
from megatron_run_engine.data import token_ids
from megatron_run_engine.data.indexed_files import IndexedReader, IndexedWriter, tokens_path
from megatron_run_engine.data.token_ids import check_ids, require_ids

#: Ids below it are known.
VOCABULARY = 100


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_ids, "_PIECE", 16)
    return tmp_path / "cache" / "megatron-run" / "checked-ids"


def written(prefix: Path, dtype: type[np.generic], wrong: dict[int, int]) -> IndexedReader:
    """A dataset of 160 ids in 20 documents, aged, with ``wrong`` ones at places."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 160).astype(dtype)
    ids[0], ids[1] = 0, VOCABULARY - 1
    for place, value in wrong.items():
        ids[place] = value
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_documents(ids, [8] * 20)
    os.utime(tokens_path(prefix), (1e9, 1e9))
    return IndexedReader(prefix)


@pytest.mark.parametrize("place", [0, 15, 16, 77, 159])
@pytest.mark.parametrize(("dtype", "value"), [(np.int32, -1), (np.int32, 300), (np.uint16, 100), (np.uint8, 255)])
def test_an_id_outside_is_named_by_file_and_byte(
    tmp_path: Path, place: int, dtype: type[np.generic], value: int
) -> None:
    reader = written(tmp_path / "a", dtype, {place: value})
    byte = place * np.dtype(dtype).itemsize
    with pytest.raises(DataError, match=rf"^token {value} at byte {byte} of .*a\.bin is outside .*: it has 100 ids"):
        check_ids(reader, VOCABULARY)
    with pytest.raises(DataError, match=rf"at byte {byte}.*from data\.paths.*; set data\.tokenizer"):
        require_ids([reader], VOCABULARY)


def test_a_last_piece_that_is_not_full_is_read_too(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.int32) as writer:
        writer.add_documents(np.array([5] * 160 + [VOCABULARY], np.int32), [161])
    with pytest.raises(DataError, match=f"token {VOCABULARY} at byte 640"):
        check_ids(IndexedReader(tmp_path / "a"), VOCABULARY)


def test_all_are_read_and_their_ends_returned(tmp_path: Path) -> None:
    reader = written(tmp_path / "a", np.int32, {})
    assert check_ids(reader, VOCABULARY) == check_ids(reader, None) == (0, VOCABULARY - 1)
    with IndexedWriter(tmp_path / "none", np.int32):
        pass
    assert check_ids(IndexedReader(tmp_path / "none"), VOCABULARY) == (0, 0)


def test_of_large_files_evenly_spread_pieces_are_read(tmp_path: Path) -> None:
    assert token_ids._places(160, None) == token_ids._places(160, 160) == list(range(0, 160, 16))
    assert token_ids._places(160, 48) == [0, 64, 144]
    assert token_ids._places(161, 16) == [0]
    reader = written(tmp_path / "a", np.uint8, {20: 255})
    assert check_ids(reader, VOCABULARY, 48)
    with pytest.raises(DataError, match="at byte 20"):
        check_ids(reader, VOCABULARY)


def test_what_was_found_right_is_not_read_again_until_it_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(token_ids, "check_ids", lambda *_: read.append(1))
    monkeypatch.setattr(token_ids, "YOUNG", 0)
    reader = written(tmp_path / "a", np.int32, {})
    for _ in range(3):
        require_ids([reader], VOCABULARY)
    assert len(read) == 1
    require_ids([reader], VOCABULARY - 1)  # another vocabulary
    os.utime(tokens_path(tmp_path / "a"), (2e9, 2e9))
    require_ids([reader], VOCABULARY)
    assert len(read) == 3
    require_ids([written(tmp_path / "b", np.uint8, {})], 256)  # every id that a byte holds is known
    assert len(read) == 3
    assert len([file for file in cache.iterdir() if not file.suffix]) == 2


def test_without_a_cache_ids_are_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="token 300 at byte 28 of"):
        require_ids([written(tmp_path / "a", np.int32, {7: 300})], VOCABULARY)


def test_datasets_share_the_bytes_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(token_ids, "check_ids", lambda _reader, _vocabulary, most: read.append(most))
    readers = [written(tmp_path / name, np.int32, {}) for name in "ab"]
    size = readers[0].tokens.nbytes
    for most, shares in ((2 * size, [size, size]), (size, [size // 2, size // 2])):
        monkeypatch.setattr(token_ids, "MOST", most)
        read.clear()
        require_ids(readers, VOCABULARY)
        assert read == shares
