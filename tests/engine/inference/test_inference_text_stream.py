"""Text that appears as tokens come: whole characters, stop strings, and in the end everything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers

from megatron_run_engine.data.tokenizer import ByteTokenizer, JsonTokenizer
from megatron_run_engine.inference.text_stream import TextStream

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
