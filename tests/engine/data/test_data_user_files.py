"""What files of other programs hold: marks, ends of lines, compressed streams that break off, pointers of git-lfs."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megatron_run.errors import DataError
from megatron_run_engine.data import user_files
from megatron_run_engine.data.documents import find_documents
from megatron_run_engine.data.user_files import (
    byte_lines,
    file_lines,
    json_line,
    read_bytes,
    read_range,
    read_text,
    text_lines,
)

#: What Python's splitlines takes for the end of a line, and no other program does.
NO_ENDS = "\x0b \x0c \x1c \x1d \x1e \x85 \u2028 \u2029 \r in a line"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"
TEXT = "".join(f"document {number} {number * 7919 % 1000}\n" for number in range(20000)).encode()


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def test_lines_end_at_the_line_feed_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"one\r\n{NO_ENDS}\n\nlast".encode())
    assert list(text_lines(path)) == [(1, "one"), (2, NO_ENDS), (3, ""), (4, "last")]
    assert byte_lines(b"") == []
    assert byte_lines(b"a\n") == [b"a"]
    assert byte_lines(b"a\r\r\n") == [b"a\r"]


def test_a_text_keeps_the_ends_of_its_lines(tmp_path: Path) -> None:
    """As data=text trains on them: a text has the same bytes in training and in evaluation."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\rthree\n")
    assert read_text(path) == "one\r\ntwo\rthree\n"


@pytest.mark.parametrize("packed", [bytes, gzip.compress, zstd])
def test_a_mark_is_no_text_however_the_file_is_kept(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    path = tmp_path / {bytes: "a.txt", gzip.compress: "a.txt.gz"}.get(packed, "a.txt.zst")
    for content in (b"", b"a", b"two", TEXT):
        for mark in (b"", user_files.MARK):
            path.write_bytes(packed(mark + content))
            assert read_bytes(path) == content


def test_a_mark_is_none_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(user_files.MARK + b"abc" + user_files.MARK)
    assert read_bytes(path) == b"abc" + user_files.MARK
    assert read_range(path, 0, 6) == b"abc"
    assert read_range(path, 6, 9) == user_files.MARK
    assert json_line(user_files.MARK + b'{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_compressed_file_that_breaks_off_anywhere_is_refused(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("a.gz" if pack is gzip.compress else "a.zst")
    whole = pack(TEXT)
    for end in {1, 5, 12, *range(4096, len(whole), 4096), len(whole) - 1}:
        path.write_bytes(whole[:end])
        with pytest.raises(DataError, match=r"cannot be unpacked|is damaged"):
            read_bytes(path)
    path.write_bytes(whole + whole[: len(whole) // 2])  # of two parts, the second one breaks off
    with pytest.raises(DataError, match="cannot be unpacked"):
        read_bytes(path)
    path.write_bytes(whole + pack(b"") + pack(b"more"))
    assert read_bytes(path) == TEXT + b"more"


def test_frames_without_text_are_skipped_and_what_is_no_frame_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"
    path.write_bytes(skipped + zstd(b"text") + skipped)
    assert read_bytes(path) == b"text"
    path.write_bytes(zstd(b"text") + b"no frame")
    with pytest.raises(DataError, match="is damaged"):
        read_bytes(path)


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_files, "LARGEST", 2**20)
    path = tmp_path / "a.zst"
    path.write_bytes(zstd(bytes(2**24)))
    with pytest.raises(DataError, match="unpacks to more than 1 MiB"):
        read_bytes(path)


def test_a_plain_file_and_its_lines_have_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole is as long as it likes."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"12345678\n123456789\n")
    monkeypatch.setattr(user_files, "LARGEST_LINE", 9)
    assert next(file_lines(path)) == (1, b"12345678")
    with pytest.raises(DataError, match=r"a\.jsonl:2 is no line: it has more than"):
        list(file_lines(path, "data.paths"))
    monkeypatch.setattr(user_files, "LARGEST", 18)
    with pytest.raises(DataError, match=r"it has 19 bytes, and at most 18 are read; cut it into smaller files"):
        read_bytes(path)


def test_members_and_zeros_behind_them_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"one ") + gzip.compress(b"") + bytes(700) + gzip.compress(b"two") + bytes(40_000))
    assert read_bytes(path) == b"one two"
    os.truncate(path, 40 << 30)
    with pytest.raises(DataError, match=r"a\.gz cannot be unpacked: zeros follow what is packed"):
        read_bytes(path)
    path.write_bytes(gzip.compress(b"one") + b"no member")
    with pytest.raises(DataError, match=r"a\.gz is damaged"):
        read_bytes(path)
    whole = gzip.compress(bytes(range(256)) * 90)
    path.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(DataError, match=r"a\.gz is damaged"):
        read_bytes(path)


def test_a_pointer_of_git_lfs_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(POINTER)
    for read in (read_text, lambda file: find_documents([str(file)]), lambda file: find_documents([str(file.parent)])):
        with pytest.raises(DataError, match=r"a pointer of git-lfs.*; run git lfs pull"):
            read(path)


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_what_is_no_text_is_said(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "a.txt"
    order = "le" if mark == codecs.BOM_UTF16_LE else "be"
    path.write_bytes(mark + "日本".encode(f"utf-16-{order}"))  # without a NUL
    for read in (read_text, lambda file: find_documents([str(file)])):
        with pytest.raises(DataError, match="it is UTF-16"):
            read(path)
    path.write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="byte 2 is not UTF-8"):
        read_text(path)
    with pytest.raises(DataError, match=r"did you mean 'a\.txt'"):
        read_text(tmp_path / "aa.txt")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", None),
        ("a.txt", POINTER),
        ("a.txt", b"\xff"),
        ("a.txt.gz", None),
        ("a.txt.gz", gzip.compress(TEXT)[:-1]),
        ("a.txt.zst", b"no frame"),
    ],
)
def test_a_fault_has_the_origin_of_the_name(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refused:
        read_text(tmp_path / name, "data.paths")
    assert refused.value.origin == "data.paths"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"\xff", "not UTF-8 at its byte 0"),
        (b"{", "no JSON: "),
        (b"[" * 100_000, "nested too deeply"),
        (b"", "no JSON"),
    ],
)
def test_a_line_that_is_no_json_says_why(line: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        json_line(line)


def test_a_line_of_json_may_hold_what_splitlines_ends_a_line_at(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False).encode() + b"\r\n")
    assert [json_line(line)["text"] for _, line in text_lines(path)] == ["a\u2028b\x85c"]


def test_lines_of_a_file_are_those_of_its_contents_one_at_a_time(tmp_path: Path) -> None:
    content = "\ufeffone\r\n\ntwo\u2028three\nfour".encode()
    (tmp_path / "a").write_bytes(content)
    assert [line for _, line in file_lines(tmp_path / "a")] == byte_lines(content.removeprefix(codecs.BOM_UTF8))
    (tmp_path / "a").write_bytes(b"short\n" + b"x" * 2**24)
    tracemalloc.start()
    assert next(file_lines(tmp_path / "a")) == (1, b"short")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("content", [None, b"version https://git-lfs.github.com/spec/v1\n"])
def test_lines_that_cannot_be_read_are_told_with_their_origin(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError) as refused:
        next(file_lines(tmp_path / "a", "data.paths"))
    assert refused.value.origin == "data.paths"
