"""Text that appears as tokens come: whole characters, stop strings, and in the end everything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers

from megatron_run_engine.data.tokenizer import ByteTokenizer, JsonTokenizer
from megatron_run_inference.text_stream import TextStream

TEXT = "naïve café: 東京 🎉🎉 end"
BYTES = ByteTokenizer()


def pieces(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    found = []
    for token in tokens:
        found.append(stream.push(token))
        if stream.stopped:
            break
    return [*found, stream.finish()]


def test_bytes_become_characters_when_they_are_whole() -> None:
    stream = TextStream(BYTES.decode, list("ü: ".encode()))
    found = pieces(stream, list(TEXT.encode()))
    assert stream.text == TEXT == "".join(found)
    assert max(map(len, found)) == 1
    assert "\ufffd" not in "".join(found)


def test_bytes_that_are_no_text_do_not_hold_back_what_follows() -> None:
    stream = TextStream(BYTES.decode, [])
    found = pieces(stream, [0xFF, 0xC3, *b"abcd", 0xE6])
    assert stream.text == "".join(found) == BYTES.decode([0xFF, 0xC3, *b"abcd", 0xE6])
    assert "".join(found[:5]).endswith("abc")


def test_a_tokenizer_that_writes_spaces_before_words_keeps_them(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([("\u2581a", -1.0), ("\u2581bc", -2.0), ("d", -3.0)]))
    made.decoder = tokenizers.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode([1]) == "bc", "alone, a word has no space before it"
    stream = TextStream(tokenizer.decode, [0])
    assert pieces(stream, [1, 2, 0]) == [" bc", "d", " a", ""]


def marked_spaces(folder: Path) -> JsonTokenizer:
    """Llama 2's form: a text loses its first space; token 0 has no text."""
    words = ["</s>", "\u2581", "\u2581a", "\u2581bc", "d"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: number for number, word in enumerate(words)}, []))
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return JsonTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize(
    "tokens", [[2, 0, 1, 2, 1], [0, 0, 3, 0, 0, 0, 0, 0, 3, 4], [1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 3]]
)
@pytest.mark.parametrize("context", [[], [2], [3, 0, 0, 0, 0, 0, 1]])
def test_tokens_without_text_take_no_space_with_them(tokens: list[int], context: list[int], tmp_path: Path) -> None:
    decode = marked_spaces(tmp_path).decode
    stream = TextStream(decode, context)
    found = "".join(pieces(stream, tokens))
    assert decode(context) + found == decode([*context, *tokens])
    assert found == stream.text


def test_tokens_that_end_a_character_and_begin_the_next_one_lose_none() -> None:
    parts = [b"\xeb", b"\x85", b"\x9a\xe9", b"\x92", b"\xb2\xe9", b"\x92", b"\xb2"]

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(parts[token] for token in tokens).decode(errors="replace")

    stream = TextStream(decode, [])
    assert "".join(pieces(stream, range(len(parts)))) == stream.text == "\ub15a\u94b2\u94b2"


def test_a_stop_that_no_text_shows_is_found_by_its_tokens(tmp_path: Path) -> None:
    stream = TextStream(marked_spaces(tmp_path).decode, [2, 0], ("</s>", "</s>d"), [(0, 4)])
    assert pieces(stream, [3, 0, 3, 0, 4, 2])[-2:] == ["d", ""]
    assert stream.stopped
    assert stream.text == " bc bcd"


@pytest.mark.parametrize("text", ["one two three", "naïve 🎉 stop here", "stostopstop", "st", ""])
@pytest.mark.parametrize("stops", [("stop",), ("two", "o t"), ("🎉 s", "here"), ("zebra",), ("e", "stopst")])
def test_a_text_ends_before_the_stop_string_that_is_complete_first(text: str, stops: tuple[str, ...]) -> None:
    """What ends first, is found by adding one character after another."""
    grown = [text[:size] for size in range(len(text) + 1)]
    ends = [each.find(stop) for each in grown for stop in stops if stop in each]
    first = next((each for each in grown if any(stop in each for stop in stops)), text)
    expected = first[: min(first.find(stop) for stop in stops if stop in first)] if ends else text
    stream = TextStream(BYTES.decode, [], stops)
    found = pieces(stream, list(text.encode()))
    assert stream.text == "".join(found) == expected
    assert stream.stopped == bool(ends)


def test_nothing_is_shown_that_a_stop_string_takes_back() -> None:
    stream = TextStream(BYTES.decode, [], ("-- end --",))
    shown = [""]
    for byte in b"a -- en - -- end --":
        shown.append(shown[-1] + stream.push(byte))
    assert all(after.startswith(before) for before, after in pairwise(shown))
    assert shown[-1] == "a -- en - "
