"""Tokenizers: bytes, and files of the `tokenizers` library, whole or broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from megatron_run.errors import DataError, ExitCode
from megatron_run_engine.data.standalone_tokenizer import byte_tokenizer_json, reads_bytes, same_vocabulary
from megatron_run_engine.data.tokenizer import ByteTokenizer, JsonTokenizer, open_tokenizer


def words(folder: Path, *special: str, extra: dict[str, int] | None = None) -> Path:
    """A tokenizer file that knows three words, and ``special`` ones."""
    vocabulary = {"one": 0, "two": 1, "three": 2, "?": 3, **(extra or {})}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_bytes_are_their_own_ids() -> None:
    tokenizer = open_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("aä\n".encode(), "x").tolist() == [97, 0xC3, 0xA4, 10]
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.unit) == (257, 256, "byte")
    assert tokenizer.decode([97, 256, 0xC3, 0xA4, 0xFF]) == "aä\N{REPLACEMENT CHARACTER}"


def test_bytes_as_a_file_have_the_same_ids_and_the_same_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_tokenizer_json())
    known, written = ByteTokenizer(), JsonTokenizer(path)
    text = "".join(map(chr, [*range(0x250), 0x2603, 0x1F600])) + "  two  spaces\r\n"
    ids = written.encode(text.encode(), "x").tolist()
    assert ids == list(text.encode())
    assert set(ids) >= {*range(0xC0), *range(0xC2, 0xCA)}
    assert (written.vocab_size, written.end_of_document) == (known.vocab_size, known.end_of_document)
    assert written.decode([*ids, 256]) == text
    assert all(written.decode([byte]) == known.decode([byte]) for byte in range(256))
    assert same_vocabulary(path, None)
    assert not same_vocabulary(None, words(tmp_path))


@pytest.mark.parametrize("use", ["text", "indexed"])
def test_a_run_on_bytes_is_known_whatever_its_data(use: str) -> None:
    assert reads_bytes({"data.use": use, "data.tokenizer": "bytes"})
    assert not reads_bytes({"data.use": use, "data.tokenizer": "bytes.json"})


def test_a_file_is_read_and_its_limits_are_lifted(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(words(tmp_path, "<|endoftext|>"))
    assert tokenizer.encode(b"three one two one", "x").tolist() == [2, 0, 1, 0]
    assert (tokenizer.end_of_document, tokenizer.vocab_size, tokenizer.unit) == (4, 5, "token")
    assert tokenizer.decode([1, 4, 2]) == "two three"


def test_without_an_end_of_document_one_id_is_added(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(words(tmp_path))
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (4, 5)


def test_the_vocabulary_reaches_to_the_highest_id(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(words(tmp_path, extra={"nine": 9}))
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (10, 11)
    assert tokenizer.encode(b"nine", "x").tolist() == [9]


def test_what_is_not_utf8_is_named_with_its_offset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus.txt is not UTF-8 at byte 4; convert it, or set data.tokenizer to byt"):
        JsonTokenizer(words(tmp_path)).encode(b"one \xff two", "corpus.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"tokenizer file .*t.json does not exist \(from data.tokenizer\); .* or say bytes"),
        ("{", r"tokenizer file .*t.json is broken: .* line 1 column 1 \(from data.tokenizer\)"),
        *((text, r"t.json is no tokenizer: it is JSON without the key model") for text in ("{}", '{"a": 1}', "[1]")),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        open_tokenizer(str(path))
    assert caught.value.exit_code == ExitCode.DATA
    assert "\n" not in str(caught.value)


def test_a_file_that_is_misspelt_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(DataError, match=r"tokeniser.json does not exist .*; did you mean 'tokenizer.json'\?$"):
        open_tokenizer(str(tmp_path / "tokeniser.json"))


@pytest.mark.parametrize(
    "place",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},  # the library panics, which is no Exception
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "absent"}},  # a bare Exception
        {"decoder": {"type": "Strip", "content": "?", "start": 0, "stop": 9}},
    ],
)
def test_a_file_that_fails_the_library_in_use_is_named(tmp_path: Path, place: dict[str, object]) -> None:
    content = json.loads(words(tmp_path).read_text())
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(content | place))
    with pytest.raises(DataError, match=r"hostile\.json fails on"):  # noqa: PT012  # some fail in the last call alone
        JsonTokenizer(path).encode(b"one b", "x")
        JsonTokenizer(path).decode([3])


def test_a_signal_while_the_library_works_is_no_fault_of_the_tokenizer(tmp_path: Path) -> None:
    class Stopped(BaseException):
        pass

    class Library:
        def encode(self, *_: object, **__: object) -> None:
            raise Stopped

    tokenizer = JsonTokenizer(words(tmp_path))
    tokenizer._tokenizer = Library()  # type: ignore[assignment]
    with pytest.raises(Stopped):
        tokenizer.encode(b"one", "x")
