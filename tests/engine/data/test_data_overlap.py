"""The share of a test set's 8-grams that a training set contains."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.errors import DataError
from megatron_run_engine.data.documents import find_documents
from megatron_run_engine.data.overlap import Overlap, ngrams, overlap, words

LETTERS = [chr(ord("a") + number) for number in range(26)]


def test_only_whole_ngrams_of_one_document_count() -> None:
    test = [" ".join(LETTERS[:12])]  # five 8-grams
    train = [" ".join(LETTERS[2:10]), " ".join(LETTERS[4:8]), " ".join(LETTERS[8:12])]
    assert overlap(test, train) == Overlap(1, 5)


def test_layout_case_and_punctuation_make_no_difference() -> None:
    test = ["One two, three four five six seven -- EIGHT."]
    assert overlap(test, ["one_two three\nfour  (five) six seven eight"]).share == 1.0


def test_repeated_ngrams_count_each_time() -> None:
    line = " ".join(LETTERS[:8])
    other = " ".join(LETTERS[8:16])
    assert overlap([line, line, other], [line]) == Overlap(2, 3)


def test_a_short_text_has_no_ngrams() -> None:
    assert list(ngrams("one two", 8)) == []
    assert overlap(["one two"], ["one two"]) == Overlap(0, 0)
    assert overlap(["one two"], []).share == 0.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("请问Python 3编程。", ["请", "问", "python", "3", "编", "程"]),
        ("カタカナとひらがな", [*"カタカナとひらがな"]),
        ("ที่ดี 12", ["ที่", "ดี", "12"]),  # a letter with its marks
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),  # scripts with spaces keep their words whole
        ("한국어 텍스트", ["한국어", "텍스트"]),
        ("na\u00efve nai\u0308ve", ["na\u00efve"] * 2),
        ("soft\u00adhyphen \uff46\uff55\uff4c\uff4c", ["softhyphen", "full"]),
        ("\ue000\ue001", []),
    ],
)
def test_words_of_every_script(text: str, found: list[str]) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "请问中国的首都是哪里并说明其历史沿革以及地理位置特点",
        "日本の首都はどこですかその歴史と地理について説明してください",
        "เมืองหลวงของประเทศไทยคือที่ใดและมีประวัติศาสตร์อย่างไร",
        "भारत की राजधानी क्या है और उसका इतिहास क्या है यह बताइए",
    ],
)
def test_a_test_set_in_any_script_is_found_in_a_text_that_holds_it(text: str) -> None:
    found = overlap([text], [f"A. {text} Z."])
    assert found.total > 0
    assert found.share == 1.0
    assert overlap([text], [text[::-1]]).share < 0.5


def test_of_json_lines_the_texts_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one\\ntwo", "id": 3}\r\n\r\n{"text": "three"}')
    (document,) = find_documents([str(path)], records=True)
    assert list(document.texts()) == ["one\ntwo", "three"]
    for line, why in (('{"txt": "a"}', "key 'text'"), ("{", "no JSON"), ("[1]", "key 'text'")):
        path.write_text('{"text": "one"}\n' + line)
        with pytest.raises(DataError, match=rf"a\.jsonl:2 is no record.*{why}"):
            list(document.texts())
