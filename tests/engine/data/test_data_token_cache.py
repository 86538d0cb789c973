"""The cache of tokens: written once, found again, never wrong, and never in the way."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_run.contracts import Split
from megatron_run.errors import DataError
from megatron_run_engine.data import token_cache
from megatron_run_engine.data.documents import Shares, find_documents, pack
from megatron_run_engine.data.token_cache import entries, open_streams, remove_old
from megatron_run_engine.data.tokenizer import ByteTokenizer

SHARES = Shares(80, 10, 10)
LOG = logging.getLogger("megatron_run")


class Counted(ByteTokenizer):
    """Appends a line to a file for every batch that it tokenises, whichever process does."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def encode_batch(self, documents: Any) -> Any:
        with self.log.open("a", encoding="utf-8") as file:
            file.write("batch\n")
        return super().encode_batch(documents)

    @property
    def times(self) -> int:
        return len(self.log.read_text(encoding="utf-8").splitlines()) if self.log.exists() else 0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the tokens. No text is too little for it, and no file too young for a link."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "SMALLEST", 1)
    monkeypatch.setattr(token_cache, "YOUNG", -(10**18))
    return tmp_path / "cache" / "megatron-run" / "tokens"


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(LOG, "propagate", True)
    caplog.set_level(logging.WARNING, LOG.name)
    return caplog


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "batches")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"document {number} says {number**5}\n" * 5)
    (folder / "large.txt").write_text("the long one, which is cut\n" * 12_000)
    return folder


def streams(corpus: Path, tokenizer: ByteTokenizer) -> Mapping[Split, NDArray[Any]]:
    return open_streams(find_documents([str(corpus)]), tokenizer, SHARES)


def expected(corpus: Path) -> dict[Split, list[int]]:
    """Packed in memory, split by split."""
    tokens: dict[Split, list[tuple[object, bytes]]] = {"train": [], "validation": [], "test": []}
    for path in sorted(corpus.iterdir()):
        for split, portion in SHARES.portions(path.read_bytes()):
            tokens[split].append((path, portion))
    return {split: pack(parts, ByteTokenizer()).tolist() for split, parts in tokens.items()}


def same(found: Mapping[Split, NDArray[Any]], corpus: Path) -> bool:
    return {split: tokens.tolist() for split, tokens in found.items()} == expected(corpus)


def test_the_second_start_tokenises_nothing_and_maps_the_same_tokens(corpus: Path, counted: Counted) -> None:
    assert same(streams(corpus, counted), corpus)
    times = counted.times
    again = streams(corpus, counted)
    assert same(again, corpus)
    assert times == counted.times > 0
    assert not again["train"].flags.writeable


@pytest.mark.parametrize("link", [True, False])
def test_other_contents_of_the_same_size_and_time_are_not_taken_for_the_old(
    corpus: Path, counted: Counted, cache: Path, link: bool
) -> None:
    """The time of a file's contents can be set; that of its entry in the folder cannot."""
    streams(corpus, counted)
    changed = corpus / "07.txt"
    status = changed.stat()
    changed.write_text(changed.read_text().replace("says", "tell"))
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    if not link:
        for path in cache.glob("*.link"):
            path.unlink()
    assert same(streams(corpus, counted), corpus)


def test_a_copy_of_the_text_needs_no_tokenising(corpus: Path, counted: Counted, tmp_path: Path) -> None:
    streams(corpus, counted)
    times = counted.times
    copy = corpus.rename(tmp_path / "moved")
    for path in copy.iterdir():
        path.write_bytes(path.read_bytes())
    assert same(streams(copy, counted), copy)
    assert counted.times == times


def test_a_name_of_json_lines_means_other_tokens_of_the_same_file(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n' * 40)
    (tmp_path / "b.txt").symlink_to("a.jsonl")
    lengths = [
        sum(map(len, open_streams(find_documents([str(tmp_path / name)]), ByteTokenizer(), SHARES).values()))
        for name in ("a.jsonl", "b.txt")
    ]
    assert lengths == [40 * len("words."), len('{"text": "words"}\n') * 40 + 1]


def test_a_file_that_is_young_gets_no_link(
    corpus: Path, counted: Counted, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "YOUNG", 2_000_000_000)
    streams(corpus, counted)
    assert list(cache.glob("*.tokens"))
    assert not list(cache.glob("*.link"))


def test_tokenizer_and_shares_have_entries_of_their_own(corpus: Path, counted: Counted) -> None:
    class Other(ByteTokenizer):
        identity = "other"

    streams(corpus, counted)
    streams(corpus, Other())
    open_streams(find_documents([str(corpus)]), counted, Shares(50, 25, 25))
    open_streams(find_documents([str(corpus)]), counted, SHARES, cut=True)
    assert len(entries()) == 4


@pytest.mark.parametrize("damage", ["a token", "the end", "cut", "empty", "foreign"])
def test_a_damaged_entry_is_made_again_with_a_notice(
    corpus: Path, counted: Counted, notices: pytest.LogCaptureFixture, damage: str
) -> None:
    streams(corpus, counted)
    (entry,) = entries()
    content = bytearray(entry.path.read_bytes())
    if damage == "a token":
        content[1000] ^= 1
    elif damage == "the end":
        content[-1] ^= 1
    changed = {"cut": content[:-100], "empty": b"", "foreign": b"\0" * 5000}.get(damage, content)
    entry.path.write_bytes(bytes(changed))
    assert same(streams(corpus, counted), corpus)
    assert "damaged" in notices.text
    notices.clear()
    assert same(streams(corpus, counted), corpus)
    assert not notices.records


def test_every_piece_of_a_small_entry_is_compared(
    corpus: Path, counted: Counted, notices: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "PIECE", 4096)
    monkeypatch.setattr(token_cache, "COMPARED", 1000)
    streams(corpus, counted)
    (entry,) = entries()
    whole = entry.path.read_bytes()
    for place in range(10, len(whole) - 6000, 40_001):
        entry.path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        notices.clear()
        assert same(streams(corpus, counted), corpus)
        assert "damaged" in notices.text


def test_a_folder_that_cannot_be_written_leaves_the_tokens_in_memory(
    corpus: Path, counted: Counted, tmp_path: Path, notices: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert same(streams(corpus, counted), corpus)
    assert "in memory" in notices.text


def test_a_full_disk_leaves_the_tokens_in_memory_and_nothing_behind(
    corpus: Path, counted: Counted, cache: Path, notices: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.copyfileobj", full)
    assert same(streams(corpus, counted), corpus)
    assert os.strerror(errno.ENOSPC) in notices.text
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_a_folder_of_somebody_else_is_not_believed(
    corpus: Path, counted: Counted, cache: Path, notices: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.parent.chmod(0o777)
    assert same(streams(corpus, counted), corpus)
    assert "no folder of this user alone" in notices.text
    assert not cache.exists()


def test_a_little_text_is_not_kept(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "SMALLEST", 10**9)
    assert same(streams(corpus, ByteTokenizer()), corpus)
    assert not cache.exists()


def test_text_that_changes_meanwhile_is_one_line(corpus: Path, tmp_path: Path, cache: Path) -> None:
    documents = find_documents([str(corpus)])
    making = token_cache.Making(ByteTokenizer(), SHARES)
    name = token_cache._name(documents, making.identity)
    (corpus / "03.txt").write_text("no longer")
    with pytest.raises(DataError, match="changed while it was tokenised"):
        token_cache._write(tmp_path / f"{name}.tokens", documents, making)
    assert not list(tmp_path.glob("*.tokens*"))


def _start(corpus: Path, log: Path) -> list[int]:
    return [int(token) for token in streams(corpus, Counted(log))["train"][:50]]


@pytest.mark.multiproc
def test_many_starts_at_once_tokenise_once(corpus: Path, counted: Counted) -> None:
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(6, mp_context=context) as pool:
        found = list(pool.map(_start, [corpus] * 6, [counted.log] * 6))
    assert len({tuple(each) for each in found}) == 1
    times = counted.times
    counted.log.unlink()
    for path in entries():
        path.path.unlink()
    streams(corpus, counted)
    assert times == counted.times


@pytest.mark.multiproc
@pytest.mark.parametrize("moment", ["tokenising", "writing"])
def test_a_killed_writer_leaves_no_harm(corpus: Path, counted: Counted, cache: Path, moment: str) -> None:
    child = os.fork()
    if not child:

        def stop(*_: object, **__: object) -> Iterator[Any]:
            os.kill(os.getpid(), signal.SIGKILL)
            yield

        try:
            setattr(token_cache, "split_streams" if moment == "tokenising" else "_pieces", stop)
            streams(corpus, counted)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(cache.glob("*.tmp"))
    assert same(streams(corpus, counted), corpus)
    assert not list(cache.glob("*.tmp"))


def test_old_entries_are_removed_with_their_links(corpus: Path, counted: Counted, cache: Path) -> None:
    mapped = streams(corpus, counted)
    (entry,) = entries()
    assert entry.text.endswith("corpus")
    assert entry.tokenizer == "bytes"
    assert entry.size == entry.path.stat().st_size
    os.utime(entry.path, (time.time() - 40 * 86400,) * 2)
    assert round(entries()[0].days) == 40
    assert not remove_old(50)
    assert [each.path for each in remove_old(30)] == [entry.path]
    assert not list(cache.glob("*.tokens"))
    assert not list(cache.glob("*.link"))
    assert same(mapped, corpus)  # what is mapped stays readable


@pytest.mark.parametrize("content", [b"\xff" * 32, b"a\0b", b"../../other", b"a" * 1000, b""])
def test_a_damaged_link_is_made_again_and_pruned(corpus: Path, counted: Counted, cache: Path, content: bytes) -> None:
    """A flipped byte of it, which is then not UTF-8, must not end every start."""
    streams(corpus, counted)
    (link,) = cache.glob("*.link")
    right = link.read_bytes()
    link.write_bytes(content)
    assert same(streams(corpus, counted), corpus)
    assert link.read_bytes() == right
    link.write_bytes(content)
    remove_old(50)
    assert not link.exists()


def test_opening_an_entry_makes_it_young(corpus: Path, counted: Counted) -> None:
    streams(corpus, counted)
    os.utime(entries()[0].path, (0, 0))
    streams(corpus, counted)
    assert entries()[0].days < 1


def test_a_stream_is_typed_by_the_vocabulary(corpus: Path, counted: Counted) -> None:
    assert {tokens.dtype for tokens in streams(corpus, counted).values()} == {np.dtype(np.uint16)}
