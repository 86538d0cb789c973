"""Characters for which a tokenizer has no token, beside what it makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron_run_engine.data.standalone_tokenizer import byte_tokenizer_json
from megatron_run_engine.data.tokenizer import JsonTokenizer, byte_characters

LETTERS = {letter: number for number, letter in enumerate("abcdefgh")}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def opened(folder: Path, made: Tokenizer) -> JsonTokenizer:
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    return JsonTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("abc", 0),
        ("a b\tc\n", 0),  # white space goes in silence: the pre-tokenizer takes it away
        ("xyz", 3),
        ("a\u65e5b c\u672cd", 2),
        ("ab<|endoftext|>c", 0),
        ("<ab<|endoftext|>c", 1),
        ("x\u65e5" * 1000, 2000),
    ],
)
def test_what_no_token_stands_for_is_counted(tmp_path: Path, text: str, lost: int) -> None:
    made = Tokenizer(models.BPE(vocab=LETTERS, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = opened(tmp_path, made)
    tokenizer.encode_batch([("it", text.encode())])
    assert tokenizer.lost == lost
    tokenizer.encode(text.encode(), "it")
    tokenizer.encode_places(text)
    assert tokenizer.lost == 3 * lost
    plain = text.replace("<|endoftext|>", "")
    assert len(tokenizer.encode(plain.encode(), "it")) == sum(map(plain.count, LETTERS))


def test_what_a_normaliser_takes_away_is_not_lost(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE(vocab=LETTERS, merges=[]))
    made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    tokenizer = opened(tmp_path, made)
    tokenizer.encode("A\u0301\u00c1xX".encode(), "it")
    assert tokenizer.lost == 2


def test_a_byte_that_the_vocabulary_lacks_is_counted(tmp_path: Path) -> None:
    made = Tokenizer(
        models.BPE(vocab={name: byte for name, byte in byte_characters().items() if byte < 128}, merges=[])
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = opened(tmp_path, made)
    tokenizer.encode("plain \u65e5\u672c".encode(), "it")
    assert tokenizer.lost == 2


def test_a_fallback_to_bytes_that_the_vocabulary_lacks_loses_them(tmp_path: Path) -> None:
    known = {name: byte for name, byte in BYTES.items() if byte < 128}
    tokenizer = opened(tmp_path, Tokenizer(models.BPE(vocab=known, merges=[], byte_fallback=True)))
    tokenizer.encode("plain \u65e5\u672c".encode(), "it")
    assert tokenizer.lost == 2


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "unknown token"])
def test_nothing_is_lost_where_every_text_has_tokens(tmp_path: Path, kind: str) -> None:
    if kind == "byte-level":
        (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer_json())
        tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    elif kind == "byte fallback":
        tokenizer = opened(tmp_path, Tokenizer(models.BPE(vocab=BYTES, merges=[], byte_fallback=True)))
    else:
        tokenizer = opened(tmp_path, Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?")))
    assert len(tokenizer.encode("plain \u65e5\u672c".encode(), "it"))
    assert tokenizer.lost == 0
