"""The share of a test set's 8-grams that a training set contains."""

from __future__ import annotations

from megatron_run_engine.data.overlap import Overlap, ngrams, overlap

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
