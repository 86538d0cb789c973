"""Spans: what encoder and decoder get together is the text, in T5's sizes, and follows from seed and sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_run.errors import DataError, InputError
from megatron_run_data_span_corruption import SpanCorruption, SpanOptions
from megatron_run_data_span_corruption.spans import Corruption, span_vocabulary
from megatron_run_engine.data.indexed_files import IndexedWriter
from megatron_run_engine.data.tokenizer import ByteTokenizer

#: Of the byte tokenizer's 257 ids, the first that is added: padding, then the end, then the sentinels.
PADDING = 257


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 40 bytes, no two neighbours of which are alike."""
    prefix = tmp_path_factory.mktemp("spans") / "docs"
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in range(30):
            writer.add((np.arange(40) * 7 + document * 11) % 256)
            writer.end_document()
    return prefix


def source(corpus: Path, **options: Any) -> SpanCorruption:
    given = {"paths": str(corpus), "split": "8,1,1", "encoder_length": 48, **options}
    return SpanCorruption(SpanOptions.model_validate(given))


def restored(sample: Mapping[str, Any]) -> list[int]:
    """The text: what the decoder is told after a sentinel takes that sentinel's place in the encoder's tokens."""
    told = sample["labels"][sample["loss_mask"] > 0].tolist()
    read = sample["encoder_tokens"][sample["encoder_mask"] > 0].tolist()
    assert told.pop() == read.pop() == PADDING + 1
    runs: dict[int, list[int]] = {}
    for token in told:
        if token > PADDING + 1:
            runs[token] = here = []
        else:
            here.append(token)
    assert [token for token in read if token > PADDING + 1] == [PADDING + 2 + run for run in range(len(runs))]
    return [token for each in read for token in runs.get(each, [each])]


def test_the_sizes_are_those_of_t5() -> None:
    """512 tokens of the encoder are 568 of the text, and 114 of the decoder (Raffel et al. 2020, appendix)."""
    corruption = Corruption(0.15, 3.0)
    assert corruption.longest(512) == 568
    assert corruption.sizes(568) == (512, 114)


def test_both_sides_together_are_the_text_of_the_documents_one_after_the_other(corpus: Path) -> None:
    data = source(corpus)
    dataset, length = data.dataset("train", 20, 7), Corruption(0.15, 3.0).longest(48)
    texts = [restored(dataset[index]) for index in range(len(dataset))]
    documents = [(np.arange(40) * 7 + document * 11) % 256 for document in range(24)]
    every = np.concatenate(documents).tolist()
    assert sum(texts, []) == every[: sum(map(len, texts))]  # noqa: RUF017  # few
    assert len(every) - sum(map(len, texts)) < 8
    assert {len(text) for text in texts[:-1]} == {length}
    assert all((sample["encoder_mask"] > 0).sum() == 48 for sample in (dataset[0], dataset[3]))


def test_the_decoder_reads_padding_and_then_what_it_was_to_tell(corpus: Path) -> None:
    sample = source(corpus).dataset("train", 20, 7)[0]
    assert sample["tokens"][0] == PADDING
    np.testing.assert_array_equal(sample["tokens"][1:], sample["labels"][:-1])
    assert (sample["labels"][sample["loss_mask"] == 0] == PADDING).all()


def test_runs_follow_from_seed_epoch_and_sample(corpus: Path) -> None:
    data = source(corpus)
    first = data.stream("train", 20, 7, 100)
    again = data.stream("train", 20, 7, 100)
    assert first is not None
    assert again is not None
    for index in (0, len(first) + 1):
        np.testing.assert_array_equal(first[index]["labels"], again[index]["labels"])
    epochs = [sorted(restored(first[epoch * len(first) + i])[0] for i in range(len(first))) for epoch in (0, 1)]
    assert epochs[0] == epochs[1]  # the same texts
    dataset = data.dataset("train", 20, 7)
    changed = [dataset.sample(0, epoch)["labels"].tolist() for epoch in range(8)]
    changed += [data.dataset("train", 20, seed)[0]["labels"].tolist() for seed in range(8, 16)]
    assert len(set(map(tuple, changed))) > 12


def test_every_way_to_cut_is_as_likely_as_any_other() -> None:
    """Of 8 tokens 4 in 2 runs: 3 ways to cut the taken, and 3 for the kept."""
    corruption, tries = Corruption(0.5, 2.0), 1800
    assert corruption.counts(8) == (4, 2)
    found = Counter(tuple(corruption.runs(8, (1, key)).tolist()) for key in range(tries))
    assert len(found) == 9
    assert max(abs(count - tries / 9) for count in found.values()) < 4 * (tries / 9) ** 0.5


def test_a_tokenizer_with_sentinels_of_its_own_keeps_them() -> None:
    class T5Like(ByteTokenizer):
        vocabulary = {"</s>": 1, "<extra_id_0>": 99, "<extra_id_1>": 98}  # noqa: RUF012

    found = span_vocabulary(T5Like(), 3)
    assert (found.end, found.sentinels.tolist()[:2]) == (1, [99, 98])
    assert (found.padding, found.sentinels.tolist()[2], found.size) == (257, 258, 259)


def test_a_decoder_that_is_too_short_and_a_split_without_text_are_refused(corpus: Path) -> None:
    with pytest.raises(InputError, match=r"is too short for the decoder: 12 tokens are taken out.*to 12 or more"):
        source(corpus).dataset("train", 11, 7)
    with pytest.raises(DataError, match="the test split holds no text"):
        source(corpus, split="999,1,0.0001").dataset("test", 20, 7)
