"""The source: splits, orders, fields, and what it says where something is missing."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron_run import load_config
from megatron_run.contracts import DataSource, Split
from megatron_run.errors import DataError, InputError, Problems
from megatron_run_data_indexed import megatron_run_create_data
from megatron_run_data_indexed.options import IndexedOptions
from megatron_run_data_indexed.samples import Permutation
from megatron_run_engine.data.indexed_files import MAGIC, IndexedReader, IndexedWriter
from megatron_run_engine.data.tokenizer import open_tokenizer
from megatron_run_testing.data import data_checks
from tests.contracts.conformance import failures
from tests.plugins.data.indexed.corpora import END, corpus

#: Tokens of a sample.
S = 8


def source(*prefixes: str, **options: Any) -> DataSource:
    return megatron_run_create_data(IndexedOptions.model_validate({"paths": prefixes, "vocab_size": 20, **options}))


def read(opened: DataSource, split: Split, count: int, seed: int = 1) -> list[tuple[int, ...]]:
    """The first samples of a split in the order of the run."""
    stream = opened.stream(split, S, seed, count)
    assert stream is not None
    return [tuple(stream[index]["tokens"].tolist()) for index in range(count)]


@pytest.mark.parametrize("asked", [{}, {"order": "megatron"}, {"packing": "documents"}], ids=str)
def test_it_conforms_in_either_order_and_packed(tmp_path: Path, asked: dict[str, str]) -> None:
    prefixes = [corpus(tmp_path / name, seed, 200) for seed, name in enumerate("ab")]
    options = {"split": "8,1,1", **asked, **({"cache": str(tmp_path)} if "order" in asked else {})}
    for weights in ((), (3.0, 1.0)):
        assert failures(data_checks(source(*prefixes, weights=weights, **options))) == {}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 2**12 + 1])
def test_a_permutation_has_every_number_once(n: int) -> None:
    found = Permutation(n, 7, 0).at(np.arange(n))
    assert sorted(found.tolist()) == list(range(n))
    one_by_one = Permutation(n, 7, 0)
    assert [one_by_one[place] for place in reversed(range(n))] == found.tolist()[::-1]
    if n > 100:
        assert not np.array_equal(found, Permutation(n, 8, 0).at(np.arange(n)))
        assert not np.array_equal(found, Permutation(n, 7, 1).at(np.arange(n)))
        assert abs(np.corrcoef(found, np.arange(n))[0, 1]) < 0.1


def test_a_permutation_puts_a_number_everywhere_equally_often() -> None:
    keys = 4000
    places = np.bincount([int(np.argmin(Permutation(8, 7, key).at(np.arange(8)))) for key in range(keys)], minlength=8)
    assert ((places - keys / 8) ** 2 / (keys / 8)).sum() < 24.3  # chi-squared, 7 degrees of freedom: one in a thousand


def test_a_permutation_is_the_same_for_ever() -> None:
    assert Permutation(10, 1234, 0).at(np.arange(10)).tolist() == [0, 5, 8, 1, 3, 6, 7, 9, 2, 4]


def test_an_epoch_reads_every_sample_once_and_the_next_in_another_order(tmp_path: Path) -> None:
    prefixes = [corpus(tmp_path / name, seed, 60, vocabulary=60_000) for seed, name in enumerate("ab")]
    opened = source(*prefixes, vocab_size=60_000)
    stream, dataset = opened.stream("train", S, 1, 1), opened.dataset("train", S, 1)
    assert stream is not None
    length = len(stream)
    expected = sorted(tuple(dataset[index]["tokens"].tolist()) for index in range(len(dataset)))
    epochs = read(opened, "train", 2 * length)
    assert sorted(epochs[:length]) == sorted(epochs[length:]) == expected
    assert epochs[:length] != epochs[length:]
    assert epochs[:length] != read(opened, "train", length, seed=2)


def test_splits_share_no_document_and_hold_all(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", 1, 100, longest=8, shortest=8, vocabulary=60_000)  # documents of one sample's size
    opened = source(prefix, vocab_size=60_000, split="70,20,10")
    tokens = []
    for split, share in (("train", 70), ("validation", 20), ("test", 10)):
        dataset = opened.dataset(split, 1, 0)  # type: ignore[arg-type]
        assert len(dataset) == 8 * share - 1
        tokens += [int(dataset[index]["tokens"][0]) for index in range(len(dataset))] + [
            int(dataset[-1 + len(dataset)]["labels"][0])
        ]
    assert tokens == IndexedReader(prefix).tokens.tolist()


def test_a_weighted_blend_keeps_its_shares_and_repeats_nothing_before_its_length(tmp_path: Path) -> None:
    prefixes = [corpus(tmp_path / name, seed, 200, vocabulary=60_000) for seed, name in enumerate("ab")]
    opened = source(*prefixes, weights="3,1", vocab_size=60_000)
    stream = opened.stream("train", S, 1, 1)
    assert stream is not None
    samples = read(opened, "train", len(stream) + 1)
    firsts = set(read(source(prefixes[0], vocab_size=60_000), "train", 200))
    assert len(set(samples[:-1])) == len(samples) - 1
    assert len(set(samples)) == len(samples) - 1  # the next one is a repetition
    whole = source(prefixes[0], vocab_size=60_000).dataset("train", S, 1)
    mine = {tuple(whole[index]["tokens"].tolist()) for index in range(len(whole))}
    assert sum(sample in mine for sample in samples[:100]) == 75
    assert firsts <= mine


def test_the_token_after_an_end_of_document_does_not_count_and_positions_start_again(tmp_path: Path) -> None:
    dataset = source(
        corpus(tmp_path / "a", 1, 50, vocabulary=4), end_of_document=END, mask_end=True, reset_positions=True
    ).dataset("train", 64, 1)
    sample = dataset[0]
    position = 0
    for column, token in enumerate(sample["tokens"].tolist()):
        assert sample["positions"][column] == position
        assert sample["loss_mask"][column] == (token != END)
        position = 0 if token == END else position + 1
    assert (sample["tokens"] == END).any()


def test_documents_end_where_they_were_prepared_to_end(tmp_path: Path) -> None:
    """Unless an id is asked for; and not where nobody knows, or two datasets differ."""
    tokenizer = words(tmp_path / "t.json", "a b c </s>")
    asked = {"vocab_size": None, "tokenizer": tokenizer, "split": "1,0,0", "reset_positions": True}
    prefixes = {end: str(tmp_path / f"ends-{end}") for end in (1, 2, None)}
    for end, prefix in prefixes.items():
        with IndexedWriter(Path(prefix), np.uint16) as writer:
            writer.add_documents(np.tile(np.array([0, 2, 1]), 50), np.full(50, 3))
        Path(f"{prefix}.json").write_text(json.dumps({"end_of_document": end}))

    def starts(*paths: str, **options: Any) -> list[int]:
        sample = source(*paths, **{**asked, **options}).dataset("train", 9, 1)[0]
        return np.flatnonzero(sample["positions"] == 0).tolist()

    assert starts(prefixes[1]) == [0, 3, 6]
    assert starts(f"{prefixes[2]}.bin") == [0, 2, 5, 8]
    assert starts(prefixes[1], prefixes[2], end_of_document=1) == [0, 3, 6]
    assert source(prefixes[2], **asked).end_of_text == 2
    with pytest.raises(InputError, match=r"end with different tokens \(.*ends-1: 1, .*ends-2: 2\).* one --end-of-doc"):
        starts(prefixes[1], prefixes[2])
    with pytest.raises(InputError, match="the token that ends a document is not known"):
        starts(prefixes[None])
    Path(f"{prefixes[1]}.json").unlink()
    assert starts(prefixes[1]) == [0]  # the tokenizer's, which is not among the tokens


def test_packed_rows_hold_every_label_once_and_join_no_documents(tmp_path: Path) -> None:
    prefixes = [corpus(tmp_path / name, seed, 60, longest=30) for seed, name in enumerate("ab")]
    expected: list[tuple[int, int]] = []
    for prefix in prefixes:
        reader = IndexedReader(prefix)
        for sequence in range(len(reader)):  # a document each
            expected += zip(reader[sequence][:-1].tolist(), reader[sequence][1:].tolist(), strict=True)
    opened = source(*prefixes, packing="documents", split="1,0,0")
    rows = opened.stream("train", S, 5, 10)
    assert rows is not None
    found = [row for index in range(len(rows)) for row in [rows[index]]]
    pairs = [tuple(row[name][np.flatnonzero(row["loss_mask"])] for name in ("tokens", "labels")) for row in found]
    assert sorted(pair for tokens, labels in pairs for pair in zip(tokens, labels, strict=True)) == sorted(expected)
    assert len({row["documents"].shape for row in found}) == 1  # of both datasets
    assert len(found) * S < 1.1 * len(expected)
    assert [f"{prefix}: " in opened.summary(S, 5) for prefix in prefixes] == [True, True]
    assert source(prefixes[0]).summary(S, 5) == ""


def test_documents_of_several_sequences_are_split_whole(tmp_path: Path) -> None:
    from megatron_run_engine.data.indexed_files import IndexedWriter

    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for document in range(10):
            for _ in range(3):
                writer.add([document] * 10)
            writer.end_document()
    opened = source(str(tmp_path / "a"), split="5,3,2")
    assert set(opened.dataset("validation", S, 1)[0]["tokens"].tolist()) == {5}
    assert len(opened.dataset("validation", 1, 1)) == 89
    packed = source(str(tmp_path / "a"), split="5,3,2", packing="documents").dataset("validation", 1, 1)
    assert len(packed) == 3 * 29


def test_a_billion_tokens_are_opened_and_read_without_their_memory(tmp_path: Path) -> None:
    documents, length = 100_000, 10_000
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2 * documents * length)  # sparse
    with (tmp_path / "a.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", MAGIC, 1, 8, documents, documents + 1))
        file.write(np.full(documents, length, "<i4").tobytes())
        file.write((np.arange(documents, dtype="<i8") * 2 * length).tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
    before = resident()
    stream = source(str(tmp_path / "a")).stream("train", 1024, 1, 10**6)
    assert stream is not None
    for index in range(50):
        assert stream[index * 10_007]["tokens"].shape == (1024,)
    assert len(stream) > 900_000
    assert resident() - before < 32 * 2**20


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_split_without_a_sample_is_one_line_with_ways_out(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", 1, 10, longest=9, shortest=9)
    with pytest.raises(DataError, match=r"validation split .* 9 tokens, and a sample needs 17") as raised:
        source(prefix, split="8,1,1").stream("validation", 16, 1, 1)
    assert "train.sequence_length to 8" in str(raised.value)
    assert len(source(prefix, split="8,1,1").dataset("validation", 8, 1)) == 1
    assert len(source(prefix, split="9,0,1").stream("validation", 8, 1, 1) or ()) == 0


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_dataset_is_named_by_its_prefix_or_either_file(tmp_path: Path, suffix: str) -> None:
    prefix = corpus(tmp_path / "a.b", 1, 50)
    assert len(source(prefix + suffix).dataset("train", S, 1)) > 10


def test_what_is_missing_is_one_line_that_says_what_to_set(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", 1, 50)
    with pytest.raises(DataError, match=r"none\.idx does not exist.*data\.paths"):
        source(str(tmp_path / "none")).dataset("train", S, 1)
    corpus(tmp_path / "corpus", 1, 50)
    with pytest.raises(DataError, match=r"corups\.idx does not exist.*did you mean 'corpus\.idx'\? name the prefix"):
        source(str(tmp_path / "corups")).dataset("train", S, 1)
    with pytest.raises(DataError, match=r"corpus\.bin\.idx does not exist.*; name the prefix of both: .*/corpus"):
        IndexedReader(tmp_path / "corpus.bin")
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin does not exist: an indexed[^;]*; name the prefix"):
        source(str(tmp_path / "corpus")).dataset("train", S, 1)
    with pytest.raises(InputError, match=r"data\.vocab_size"):
        _ = source(prefix, vocab_size=None).vocab_size
    with pytest.raises(InputError, match=r"data\.end_of_document"):
        source(prefix, mask_end=True).dataset("train", S, 1)
    with pytest.raises(ValidationError, match="3 numbers for 1"):
        source(prefix, weights="1,2,3")
    with pytest.raises(InputError, match="less than one sample"):
        source(prefix, prefix, prefix, weights="1,1e-9,1e-9").stream("train", S, 1, 1)


def words(path: Path, names: str) -> str:
    """A tokenizer of whole words, whose ids are their places."""
    vocabulary = {name: place for place, name in enumerate(names.split())}
    Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(path))
    return str(path)


def test_tokens_of_another_tokenizer_are_refused_before_they_are_read(tmp_path: Path) -> None:
    made, other = words(tmp_path / "made.json", "a b c </s>"), words(tmp_path / "other.json", "b a c </s>")
    larger, smaller = words(tmp_path / "larger.json", "a b c </s> d"), words(tmp_path / "smaller.json", "a b </s>")
    prefix = tmp_path / "set"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_documents(np.tile(np.arange(4), 50), np.full(50, 4))

    def told(**options: Any) -> str:
        with pytest.raises(DataError) as caught:
            len(source(str(prefix), split="1,0,0", **options).dataset("train", S, 1))
        return str(caught.value)

    def opens(**options: Any) -> bool:
        return len(source(str(prefix), split="1,0,0", **options).dataset("train", S, 1)) > 0

    assert opens(vocab_size=None, tokenizer=other), "nothing says what made it"
    identity = open_tokenizer(made).identity
    (tmp_path / "set.json").write_text(json.dumps({"tokenizer": made, "identity": identity, "vocab_size": 4}))
    assert opens(vocab_size=None, tokenizer=made)
    assert opens(vocab_size=None, tokenizer=larger), "added tokens change no id"
    for name in (other, smaller):
        assert told(vocab_size=None, tokenizer=name) == (
            f"data.tokenizer={name} did not make the tokens of {prefix}: {prefix}.json says that {made} made it, with "
            f"4 ids (from data.paths); set data.tokenizer={made}, or prepare the texts again"
        )
    assert told(vocab_size=3).endswith("set data.vocab_size=4")
    assert opens(vocab_size=4)
    Path(made).unlink()
    assert opens(vocab_size=None, tokenizer=other), "of a tokenizer that is gone only the number of ids is known"
    assert "did not make the tokens" in told(vocab_size=None, tokenizer=smaller)
    for damaged in ("garbage", "[]", '{"text": "a"}\n{"text": "b"}\n'):
        (tmp_path / "set.json").write_text(damaged)
        refused = told(vocab_size=None, tokenizer=other)
        assert refused.startswith(
            f"{prefix}.json does not say how the dataset beside it was prepared: it is damaged, or"
        )


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_token_beyond_the_vocabulary_blames_the_vocabulary_and_not_the_plugin(tmp_path: Path, packing: str) -> None:
    prefix = corpus(tmp_path / "a", 1, 50)
    with pytest.raises(DataError, match=r"^token \d+ at byte \d+ of .*a.bin .* has 7 ids .*; set data.tokenizer, or"):
        source(prefix, vocab_size=7, packing=packing).dataset("train", S, 1)
    with mock.patch("megatron_run_engine.data.token_ids.check_ids"):  # as of files too large to be read before a step
        opened = source(prefix, vocab_size=7, packing=packing).dataset("train", S, 1)
    with pytest.raises(DataError, match=r"^token \d+ of the data is not among the 7 ids .*; megatron-run data inspect"):
        opened[0]


@pytest.mark.parametrize("other", [{"order": "megatron"}, {"mask_end": True}, {"reset_attention": True}], ids=str)
def test_packed_documents_are_not_joined_or_reordered(other: dict[str, Any]) -> None:
    asked = {"use": "indexed", "paths": ["a"], "vocab_size": 20, "packing": "documents", **other}
    with pytest.raises(Problems, match=rf"data\.{next(iter(other))}"):
        load_config("preset:tiny", sets={f"data.{name}": value for name, value in asked.items()})


def test_a_tokenizer_gives_vocabulary_end_and_text(tmp_path: Path) -> None:
    opened = source(corpus(tmp_path / "a", 1, 50), vocab_size=None, tokenizer="bytes")
    assert (opened.vocab_size, opened.end_of_text) == (257, 256)
    assert opened.decode(opened.encode("text") or ()) == "text"
    assert source(corpus(tmp_path / "b", 1, 50)).encode("text") is None
