"""Packing: the stream of ids, and samples that cover it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_run.errors import DataError
from megatron_run_engine.data.documents import PackedDataset, pack
from megatron_run_engine.data.tokenizer import ByteTokenizer


class Narrow(ByteTokenizer):
    """Knows ids 0 to 99 only, and gives others all the same."""

    vocab_size = 100
    end_of_document = 99


def test_an_end_follows_each_document() -> None:
    stream = pack([("a", b"ab"), ("b", b"c")], ByteTokenizer())
    assert stream.tolist() == [97, 98, 256, 99, 256]
    assert stream.dtype == np.uint16


def test_no_documents_are_an_empty_stream() -> None:
    assert len(PackedDataset(pack([], ByteTokenizer()), 4)) == 0


def test_an_id_beyond_the_vocabulary_is_named_with_file_and_offset() -> None:
    with pytest.raises(DataError, match=r"corpus.txt holds token id 120 at token 2: the vocabulary has 100 ids"):
        pack([("fine.txt", b"AB"), ("corpus.txt", b"ABxBx")], Narrow())


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (13, 3)])
def test_the_number_of_samples(tokens: int, samples: int) -> None:
    assert len(PackedDataset(np.arange(tokens), 4)) == samples


def test_samples_cover_the_stream_and_labels_are_the_next_tokens() -> None:
    dataset = PackedDataset(np.arange(100, 115, dtype=np.uint16), 4)
    samples = [dataset[index] for index in range(len(dataset))]
    assert [sample["tokens"].tolist() for sample in samples] == [
        [100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110, 111]
    ]  # fmt: skip
    assert [sample["labels"].tolist() for sample in samples] == [
        [101, 102, 103, 104], [105, 106, 107, 108], [109, 110, 111, 112]
    ]  # fmt: skip
    assert all(sample["loss_mask"].tolist() == [1, 1, 1, 1] for sample in samples)
    tokens, labels = dataset.pairs([2, 0])
    assert tokens.tolist() == list(np.concatenate([samples[2]["tokens"], samples[0]["tokens"]]))
    assert labels.tolist() == list(np.concatenate([samples[2]["labels"], samples[0]["labels"]]))


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_there_is_no_sample_beyond_the_last(index: int) -> None:
    with pytest.raises(IndexError):
        PackedDataset(np.arange(13), 4)[index]
