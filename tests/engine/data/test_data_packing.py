"""Packing: best-fit rows, and samples in which every document is whole and alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from megatron_run_engine.data.packing import PackedDocuments, best_fit, bounds_of, one_a_row


def spaces_left(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing by its definition: one document after the other, each where least space is left."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        tightest = min((space for space in spaces if space >= length), default=None)
        if tightest is None:
            spaces.append(capacity - length)
        else:
            spaces[spaces.index(tightest)] -= length
    return sorted(spaces)


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_those_of_best_fit_decreasing(seed: int) -> None:
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 50))
    lengths = generator.integers(1, capacity + 1, generator.integers(0, 80))
    rows = best_fit(lengths, capacity)
    assert sorted(rows.pieces.tolist()) == list(range(len(lengths)))
    left = [capacity - int(lengths[rows.pieces[a:b]].sum()) for a, b in pairwise(rows.bounds.tolist())]
    assert sorted(left) == spaces_left(lengths.tolist(), capacity)


def stream_of(*documents: str) -> tuple[np.ndarray, np.ndarray]:
    stream = np.frombuffer("".join(document + "." for document in documents).encode(), np.uint8)
    return stream, bounds_of(stream, ord("."))


def told(dataset: PackedDocuments) -> list[list[tuple[str, str]]]:
    """Of each row its documents as text: tokens, and the labels that count."""
    rows = []
    for index in range(len(dataset)):
        row: dict[str, Any] = dict(dataset[index])
        texts = []
        for start, stop in pairwise(row["documents"].tolist()):
            assert row["positions"][start:stop].tolist() == list(range(stop - start))
            labels = row["labels"][start:stop][row["loss_mask"][start:stop] > 0]
            if len(labels):
                texts.append((bytes(row["tokens"][start:stop].tolist()).decode(), bytes(labels.tolist()).decode()))
        rows.append(texts)
    return rows


def test_every_label_of_a_document_is_in_one_row_with_what_precedes_it() -> None:
    stream, bounds = stream_of("abcde", "fg", "", "hij", "k")
    dataset = PackedDocuments(stream, bounds, 8, padding=0)
    assert told(dataset) == [[("abcde", "bcde."), ("hij", "ij.")], [("fg", "g."), ("k", ".")]]
    assert str(dataset) == "4 documents in 2 rows of 8 tokens, 68.8% full"
    assert dataset[1]["documents"].tolist() == [0, 2, 3, 8]
    tokens, labels = dataset.pairs([1])
    assert (bytes(tokens.tolist()), bytes(labels.tolist())) == (b"fgk", b"g..")


def test_a_document_longer_than_a_row_is_cut_and_no_label_is_lost() -> None:
    stream, bounds = stream_of("abcdefgh", "ij")
    dataset = PackedDocuments(stream, bounds, 3, padding=0)
    assert sorted(document for row in told(dataset) for document in row) == [
        ("abc", "bcd"), ("def", "efg"), ("gh", "h."), ("ij", "j.")
    ]  # fmt: skip
    assert str(dataset).endswith("; 1 longer than a row were cut")


def test_rows_of_one_document_are_padded_and_labels_that_do_not_count_are_masked() -> None:
    stream, bounds = stream_of("abc", "de")
    counts = np.isin(stream, np.frombuffer(b"ce", np.uint8))
    dataset = PackedDocuments(stream, bounds, 4, padding=7, counts=counts, fit=one_a_row)
    assert told(dataset) == [[("abc", "c")], [("de", "e")]]
    assert dataset[1]["tokens"].tolist() == [ord("d"), ord("e"), 7, 7]
    assert dataset[1]["documents"].tolist() == [0, 2, 4]


@pytest.mark.parametrize("index", [-1, 2])
def test_there_is_no_row_beyond_the_last(index: int) -> None:
    with pytest.raises(IndexError):
        PackedDocuments(*stream_of("ab", "cd"), 3, padding=0, fit=one_a_row)[index]
