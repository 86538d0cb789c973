"""Files of other programs, prepared: their marks, ends of lines and text without tokens; and given back as text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_run.errors import DataError
from megatron_run_data_indexed.preparation import inputs
from megatron_run_data_indexed.preparation import prepare as preparation
from megatron_run_data_indexed.preparation.import_export import export
from megatron_run_data_indexed.preparation.inputs import Separator, blocks, find_inputs
from megatron_run_data_indexed.preparation.inspect import tokenizer_of
from megatron_run_data_indexed.preparation.prepare import Preparation, Totals, prepare
from megatron_run_data_indexed.preparation.records import Reading, read_records
from megatron_run_engine.data.indexed_files import IndexedReader

MARK = b"\xef\xbb\xbf"


def prepared(source: Path, tokenizer: str = "bytes", separator: bytes | None = None) -> tuple[Path, Totals]:
    prefix = source.with_name(f"{source.name}.set")
    found, _ = find_inputs([str(source)])
    job = Preparation(tuple(found), prefix, tokenizer, Reading(separator=separator))
    return prefix, prepare(job, overwrite=True, tell=lambda _: None, progress=lambda _: None)


def documents(prefix: Path) -> list[bytes]:
    """Each document of bytes without its end."""
    reader = IndexedReader(prefix)
    return [bytes(reader[number][:-1].tolist()) for number in range(len(reader))]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_a_separator_of_ends_of_lines_is_found_with_those_of_windows(tmp_path: Path, name: str) -> None:
    for end in (b"\n", b"\r\n"):
        content = (end * 2).join([b"one", b"two" + end + b"more", b"three"]) + end
        path = tmp_path / name
        whole = MARK + content
        path.write_bytes({".txt": whole, ".gz": gzip.compress(whole), ".zst": zstandard.compress(whole)}[path.suffix])
        for separator in (b"\n\n", b"\r\n\r\n"):
            prefix, totals = prepared(path, separator=separator)
            assert documents(prefix) == [b"one", b"two" + end + b"more", b"three" + end]
            assert totals.empty == 0


def test_no_document_follows_from_where_blocks_are_cut(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\r\n--\r\n".join(bytes(generator.integers(97, 123, 50, np.uint8)) for _ in range(200)))
    (source,), _ = find_inputs([str(path)])
    found = [
        [record.text for block in blocks([source], b"\n--\n", size) for record in read_records(block, reading)]
        for size in (7, 64, 1000, 10**6)
        for reading in [Reading(separator=b"\n--\n")]
    ]
    assert all(each == found[-1] for each in found)
    assert len(found[0]) == 200
    assert Separator(b".\n").split(b"a.\r\nbx\nc.\n") == [b"a", b"bx\nc"], "other characters mean themselves"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("separator", [b"\n\n", b"aba", b"\r\n"])
def test_a_separator_that_overlaps_itself_is_found_alike_whatever_the_blocks(
    tmp_path: Path, separator: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of line feeds of all lengths, some as those of Windows, and blocks that are cut in the middle of them."""
    monkeypatch.setattr(inputs, "_CHUNK", 8)
    generator = np.random.default_rng(0)
    pieces = [
        b"abx"[: generator.integers(4)] + b"\r" * int(generator.integers(2)) + b"\n" * int(generator.integers(6))
        for _ in range(300)
    ]
    pieces += [b"ab" * int(generator.integers(1, 6)) for _ in range(100)]
    content = b"".join(pieces[index] for index in generator.permutation(len(pieces)))
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    (source,), _ = find_inputs([str(path)])
    reading = Reading(separator=separator)
    found = [
        [record.text for block in blocks([source], separator, size) for record in read_records(block, reading)]
        for size in (1, 7, 64, 200, 10**6)
    ]
    assert len(found[-1]) > 50
    assert all(each == found[-1] for each in found)


@pytest.mark.parametrize("text", ["plain", "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1eh", "\ufeffinside"])
def test_json_lines_hold_every_character_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": text}, ensure_ascii=False).encode()
    path.write_bytes(MARK + line + b"\r\n\r\n" + MARK + line)  # the second mark: two files one after the other
    prefix, totals = prepared(path)
    assert documents(prefix) == [text.encode()] * 2
    assert (totals.empty, totals.malformed) == (1, 0)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_compressed_input_that_breaks_off_makes_no_dataset(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("a.txt.gz" if pack is gzip.compress else "a.txt.zst")
    content = pack("".join(f"document {number * 7919 % 9973}\n\n" for number in range(5000)).encode())
    path.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(DataError, match="cannot be unpacked"):
        prepared(path, separator=b"\n\n")
    assert not (tmp_path / f"{path.name}.set.idx").exists()


def test_text_without_a_token_is_counted_and_a_document_of_such_text_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<|endoftext|>"], show_progress=False)
    made.train_from_iterator(["hello there world"] * 20, trainer)
    made.save(str(tmp_path / "t.json"))
    path = tmp_path / "a.jsonl"
    texts = ["hello 日本 world", "日本語", "there", "wor日ld"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prefix, totals = prepared(path, str(tmp_path / "t.json"))
    assert (totals.documents, totals.empty, totals.lost) == (3, 1, 6)
    assert len(IndexedReader(prefix)) == 3
    monkeypatch.setattr(preparation, "SMALLEST", 16)  # a block for each line
    _, totals = prepared(path, str(tmp_path / "t.json"))
    assert (totals.documents, totals.empty, totals.lost) == (3, 1, 6)


def test_a_dataset_as_text_makes_the_same_dataset_again(tmp_path: Path) -> None:
    """Control tokens stand in its text by their names, and so does an end of a document in the middle of one."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["user hi assistant yo"] * 20, trainer)
    made.add_tokens([AddedToken("<tool>", special=False)])
    made.save(str(tmp_path / "t.json"))
    texts = [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n",
        "one<|endoftext|>two <tool> 日本\r\n",
        "<|endoftext|>",
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    first, _ = prepared(path, str(tmp_path / "t.json"))
    export(first, tmp_path / "back.jsonl", tokenizer_of(first, None), "text")
    assert [json.loads(line)["text"] for line in (tmp_path / "back.jsonl").read_text().split("\n")[:-1]] == texts
    second, totals = prepared(tmp_path / "back.jsonl", str(tmp_path / "t.json"))
    assert totals.lost == 0
    assert first.with_name(f"{first.name}.bin").read_bytes() == second.with_name(f"{second.name}.bin").read_bytes()
