"""Pairs of texts, and which of their words are hidden."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_run.errors import DataError, InputError
from megatron_run_data_sentence_pairs import PairOptions, SentencePairs, megatron_run_create_data
from megatron_run_data_sentence_pairs.masking import Draws, Masking
from megatron_run_engine.data.indexed_files import IndexedWriter

LENGTH = 64
#: A vocabulary of WordPiece: words, and what goes on with one.
WORDS = [*(f"w{number}" for number in range(40)), *(f"##s{number}" for number in range(20)), "."]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP, MASK = 1, 2, 3


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wordpiece") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *WORDS]) + "\n")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 documents of 5 to 400 tokens, each ended by [SEP] as ``data prepare`` does; no token is special elsewhere."""
    prefix, generator = tmp_path_factory.mktemp("corpus") / "docs", np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(100):
            writer.add([*generator.integers(5, 5 + len(WORDS), generator.integers(5, 400)), SEP])
            writer.end_document()
    return prefix


def source(corpus: Path, vocabulary: Path, **options: Any) -> SentencePairs:
    given = {"paths": str(corpus), "tokenizer": str(vocabulary), "split": "80,10,10", **options}
    return SentencePairs(PairOptions.model_validate(given))


def documents_of(corpus: Path) -> list[list[int]]:
    from megatron_run_engine.data.indexed_files import IndexedReader

    reader = IndexedReader(corpus)
    return [reader[number].tolist() for number in range(len(reader))]


def texts_of(sample: Any) -> tuple[list[int], list[int]]:
    """The two texts in the order of the sample, from its labels."""
    used = int(sample["documents"][1])
    labels = sample["labels"][:used].tolist()
    assert labels[0] == CLS
    assert labels[-1] == SEP
    middle = int(np.flatnonzero(sample["token_types"])[0])
    assert labels[middle - 1] == SEP
    assert sample["token_types"].tolist() == [0] * middle + [1] * (used - middle) + [0] * (LENGTH - used)
    return labels[1 : middle - 1], labels[middle:-1]


def test_a_sample_is_two_neighbouring_texts_of_one_document(corpus: Path, vocabulary: Path) -> None:
    documents = [" ".join(map(str, document)) for document in documents_of(corpus)]
    pairs = source(corpus, vocabulary).dataset("train", LENGTH, 7)
    swaps = []
    for number in range(len(pairs)):
        sample = pairs[number]
        first, second = texts_of(sample)
        swaps.append(int(sample["swapped"]))
        text = " ".join(map(str, second + first if sample["swapped"] else first + second))
        assert any(text in document for document in documents)
    assert 0.4 < np.mean(swaps) < 0.6


def test_every_document_is_cut_into_as_many_samples_as_it_fills(corpus: Path, vocabulary: Path) -> None:
    room = LENGTH - 3
    sizes = [len(document) for document in documents_of(corpus)][:80]
    expected = sum(size // room + (size % room >= 8) for size in sizes)
    assert len(source(corpus, vocabulary).dataset("train", LENGTH, 7)) == expected


def test_texts_part_where_a_sentence_ends(tmp_path: Path, vocabulary: Path) -> None:
    """By the period, and where a dataset has sentences as sequences, by those."""
    with IndexedWriter(tmp_path / "periods", np.uint16) as writer:
        writer.add([10, 11, 12, 65, 13, 14, 15, 16, 17, 18])
        writer.end_document()
    with IndexedWriter(tmp_path / "sentences", np.uint16) as writer:
        for sentence in ([10, 11, 65, 13], [14, 15, 16, 65, 17, 18]):
            writer.add(sentence)
        writer.end_document()
    for name in ("periods", "sentences"):
        pairs = source(tmp_path / name, vocabulary, split="1,0,0").dataset("train", LENGTH, 7)
        for epoch in range(20):
            sample = pairs.sample(0, epoch)
            first, second = texts_of(sample)
            if len(first) + len(second) == 10:
                assert len(second if sample["swapped"] else first) == 4


def test_hidden_are_whole_words_and_a_seventh_of_the_tokens(corpus: Path, vocabulary: Path) -> None:
    pairs = source(corpus, vocabulary).dataset("train", LENGTH, 7)
    chosen = total = 0
    for number in range(len(pairs)):
        sample = pairs[number]
        guessed, labels = sample["loss_mask"] > 0, sample["labels"]
        begins = ~((labels >= 45) & (labels < 65))  # all but ##s0 to ##s19
        used, middle = int(sample["documents"][1]), int(np.flatnonzero(sample["token_types"])[0])
        assert not guessed[[0, middle - 1, used - 1]].any()
        assert not guessed[used:].any()
        np.testing.assert_array_equal(sample["tokens"][~guessed], labels[~guessed])
        begins[[1, middle]] = True  # a text may begin within a word
        going_on = np.flatnonzero(~begins)
        np.testing.assert_array_equal(guessed[going_on], guessed[going_on - 1])
        assert (
            1 <= guessed.sum() <= max(round(0.15 * (used - 3)), guessed[:middle].sum() if guessed.sum() < 4 else 0, 9)
        )
        chosen, total = chosen + int(guessed.sum()), total + used - 3
    assert 0.14 < chosen / total < 0.155


def test_runs_become_masks_random_tokens_or_stay_by_eight_one_and_one() -> None:
    """Where each token is a word and one run is hidden, a run is one of three kinds, by its tokens alike."""
    masking = Masking(np.ones(1000, np.bool_), mask=3, stop=1000, share=0.05, longest=3)
    tokens = np.full(200, 7, np.int64)
    kinds, lengths = Counter[str](), Counter[int]()
    for number in range(3000):
        hidden, chosen = masking.apply(tokens, ((0, 200),), Draws(number))
        for guessed, run in groupby(range(200), key=lambda place: bool(chosen[place])):
            if guessed:
                seen = hidden[list(run)]
                kind = "mask" if (seen == 3).all() else "same" if (seen == 7).all() else "random"
                kinds[kind] += 1
                lengths[len(seen)] += 1
    total = sum(kinds.values())
    assert kinds["mask"] / total == pytest.approx(0.8, abs=0.02)
    assert kinds["random"] / total == pytest.approx(0.1, abs=0.02)
    assert kinds["same"] / total == pytest.approx(0.1, abs=0.02)
    assert lengths[1] > 1.5 * lengths[2] > 1.5 * lengths[3]


def test_a_sample_follows_from_seed_epoch_and_index(corpus: Path, vocabulary: Path) -> None:
    made = source(corpus, vocabulary)
    first, again, other = (made.dataset("train", LENGTH, seed)[3] for seed in (7, 7, 8))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["tokens"], other["tokens"])
    pairs = made.dataset("train", LENGTH, 7)
    one, two = (pairs.sample(3, epoch) for epoch in (0, 1))
    assert not np.array_equal(one["loss_mask"], two["loss_mask"])
    stream, size = made.stream("train", LENGTH, 7, 1000), len(pairs)
    for epoch in (0, 1):  # each epoch reads every piece once
        seen = [stream[epoch * size + place] for place in range(size)]
        read = {tuple(sorted(map(tuple, texts_of(sample)))) for sample in seen}
        assert read == {tuple(sorted(map(tuple, texts_of(pairs.sample(n, epoch))))) for n in range(size)}


def test_bytes_get_special_tokens_of_their_own(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "bytes", np.uint16) as writer:
        writer.add(list(b"This is one. And this another. "))
        writer.end_document()
    made = SentencePairs(PairOptions(paths=(str(tmp_path / "bytes"),), split=(1, 0, 0)))
    assert made.vocab_size == 257 + 4
    sample = made.dataset("train", LENGTH, 7)[0]
    assert sample["labels"][0] == 257
    assert made.decode(sample["labels"].tolist()).startswith(("This", "And", " And"))


def test_mistakes_are_told(tmp_path: Path, corpus: Path, vocabulary: Path) -> None:
    with pytest.raises(DataError, match=r"data\.paths"):
        megatron_run_create_data(PairOptions())
    with pytest.raises(InputError, match="sequence_length=8 leaves 5"):
        source(corpus, vocabulary).dataset("train", 8, 7)
    with pytest.raises(DataError, match="holds no pair"):
        source(corpus, vocabulary, split="998,1,1").dataset("validation", LENGTH, 7)
