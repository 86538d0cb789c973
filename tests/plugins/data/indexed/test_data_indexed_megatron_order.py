"""order=megatron against megatron-core: indices, samples, blends."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_run.errors import DataError
from megatron_run_data_indexed import megatron_run_create_data
from megatron_run_data_indexed.megatron_order import build, fits, split_bounds
from megatron_run_data_indexed.options import IndexedOptions
from megatron_run_data_indexed.samples import GPTSamples
from megatron_run_engine.data.indexed_files import IndexedReader
from tests.plugins.data.indexed.corpora import END, built, corpus, gpt_config, megatron


@pytest.mark.parametrize("seed", range(30))
def test_indices_equal_gpt_datasets(tmp_path: Path, seed: int) -> None:
    oracle, generator = megatron(), np.random.default_rng(seed)
    prefix = corpus(tmp_path / "a", seed, int(generator.integers(8, 60)), shortest=seed % 2)
    sequence_length, shares = int(generator.integers(2, 30)), (70, 20, 10)
    read = IndexedReader(prefix)
    first, last = split_bounds(shares, len(read))[0]
    epoch = int(read.lengths[first:last].sum()) // sequence_length
    samples = None if seed % 6 == 0 else int(generator.integers(1, 4 * epoch + 2))
    config = gpt_config(oracle, tmp_path / "cache", sequence_length, seed, blend=([prefix], None), split="70,20,10")
    expected = oracle.gpt.GPTDataset(
        oracle.files.IndexedDataset(prefix),
        prefix,
        np.arange(first, last, dtype=np.int32),
        samples,
        oracle.split.train,
        config,
    )
    found = build(read.lengths, (first, last), sequence_length, samples, seed)
    for name in ("document", "sample", "shuffle"):
        wanted = getattr(expected, f"{name}_index")
        made = getattr(found, "shuffle" if name == "shuffle" else f"{name}s")
        assert made.dtype == wanted.dtype
        np.testing.assert_array_equal(made, wanted)
    assert fits(found, read.lengths, (first, last), sequence_length, samples)


def _changed(numbers: NDArray[Any], place: tuple[int, ...], value: int) -> NDArray[Any]:
    changed = numbers.copy()
    changed[place] = value
    return changed


def test_indices_that_lead_outside_do_not_fit(tmp_path: Path) -> None:
    read = IndexedReader(corpus(tmp_path / "a", 1, 40))
    asked = (read.lengths, (5, 30), 8, 300)
    index = build(*asked, 1)
    documents, samples, shuffle = index
    for wrong in (
        index._replace(documents=_changed(documents, (3,), 4)),
        index._replace(documents=_changed(documents, (3,), 30)),
        index._replace(documents=documents[:-1]),
        index._replace(samples=_changed(samples, (7, 0), len(documents))),
        index._replace(samples=_changed(samples, (7, 0), -1)),
        index._replace(samples=_changed(samples, (7, 1), int(read.lengths.max()) + 1)),
        index._replace(samples=samples.astype(np.int64)),
        index._replace(samples=samples[:, :1]),
        index._replace(samples=samples[:, 0]),
        index._replace(shuffle=_changed(shuffle, (0,), len(shuffle))),
        index._replace(shuffle=shuffle[:-1]),
        index._replace(shuffle=shuffle.astype(np.int64)),
    ):
        assert not fits(wrong, *asked)


def test_a_sample_that_is_not_of_its_length_is_refused(tmp_path: Path) -> None:
    """Within its bounds, and yet not what was written: of a damaged disk, or of somebody else's."""
    read = IndexedReader(corpus(tmp_path / "a", 1, 40))
    index = build(read.lengths, (0, 40), 8, None, 1)
    for column, value in ((0, 0), (0, len(index.documents) - 1), (1, 0), (1, int(read.lengths.max()))):
        samples = GPTSamples(read, index._replace(samples=_changed(index.samples, (9, column), value)), 8)
        with pytest.raises(DataError, match=r"the cached sample order is damaged: sample [89] has \d+ tokens?, not 9"):
            list(map(samples.__getitem__, range(len(samples))))


@pytest.mark.parametrize("shares", [(969, 30, 1), (90, 5, 5), (1, 0, 0), (1, 1, 1), (0.7, 0.2, 0.1), (98, 2, 0)])
def test_splits_end_where_megatron_cores_do(tmp_path: Path, shares: tuple[float, float, float]) -> None:
    oracle = megatron()
    text = ",".join(map(str, shares))
    matrix = gpt_config(oracle, tmp_path, 8, 1, blend=(["a"], None), split=text).split_matrix
    for number in (1, 2, 7, 100, 12345):
        for (first, last), bounds in zip(split_bounds(shares, number), matrix, strict=True):
            if bounds is None:
                assert first == last
            else:
                assert (first, last) == tuple(round(bound * float(number)) for bound in bounds)


def test_the_first_1000_samples_equal_gpt_datasets_token_for_token(tmp_path: Path) -> None:
    oracle = megatron()
    prefix = corpus(tmp_path / "a", 3, 2000)
    config = gpt_config(oracle, tmp_path / "theirs", 32, 1234, blend=([prefix], None), split="969,30,1")
    theirs = built(oracle, config, (1500, 8, 0))
    source = megatron_run_create_data(
        IndexedOptions(paths=(prefix,), order="megatron", cache=str(tmp_path / "ours"), vocab_size=20)
    )
    ours = source.stream("train", 32, 1234, 1500)
    assert ours is not None
    assert len(ours) == len(theirs[0]) >= 1500
    for index in range(1000):
        np.testing.assert_array_equal(ours[index]["tokens"], theirs[0][index]["tokens"])
        np.testing.assert_array_equal(ours[index]["labels"], theirs[0][index]["labels"])
    validation = source.stream("validation", 32, 1234, 8)
    assert validation is not None
    for index in range(8):
        np.testing.assert_array_equal(validation[index]["tokens"], theirs[1][index]["tokens"])


def within(documents: NDArray[Any], length: int) -> NDArray[np.bool_]:
    """What may be attended to, [s, s], from the bounds of documents."""
    allowed = np.zeros((length, length), np.bool_)
    for first, last in pairwise(documents.tolist()):
        allowed[first:last, first:last] = np.tri(last - first, dtype=np.bool_)
    return allowed


@pytest.mark.parametrize("seed", range(10))
def test_blended_samples_masks_and_positions_equal_megatron_cores(tmp_path: Path, seed: int) -> None:
    oracle, generator = megatron(), np.random.default_rng(seed)
    number, sequence_length, samples = int(generator.integers(2, 5)), int(generator.integers(2, 30)), 60
    prefixes = [
        corpus(tmp_path / f"{each}", 10 * seed + each, int(generator.integers(30, 90))) for each in range(number)
    ]
    weights = generator.random(number).tolist() if seed % 3 else None
    config = gpt_config(
        oracle,
        tmp_path / "theirs",
        sequence_length,
        seed,
        blend=(prefixes, weights),
        split="70,20,10",
        reset_position_ids=True,
        reset_attention_mask=True,
        create_attention_mask=True,
        eod_mask_loss=True,
    )
    theirs = built(oracle, config, (samples, 5, 0 if weights is None else 5))[0]
    ours = megatron_run_create_data(
        IndexedOptions(
            paths=tuple(prefixes),
            weights=tuple(weights or ()),
            split=(70, 20, 10),
            order="megatron",
            cache=str(tmp_path / "ours"),
            vocab_size=20,
            end_of_document=END,
            mask_end=True,
            reset_positions=True,
            reset_attention=True,
        )
    ).stream("train", sequence_length, seed, samples)
    assert ours is not None
    named = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_mask", "positions": "position_ids"}
    for index in range(min(samples, len(theirs))):
        for name, theirs_name in named.items():
            np.testing.assert_array_equal(ours[index][name], theirs[index][theirs_name])
        forbidden = theirs[index]["attention_mask"][0].numpy()
        np.testing.assert_array_equal(within(ours[index]["documents"], sequence_length), ~forbidden)


def test_after_the_samples_that_it_shuffled_the_stream_starts_again(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", 1, 50)
    options = IndexedOptions(
        paths=(prefix,), order="megatron", cache=str(tmp_path / "cache"), vocab_size=20, samples=40, split=(1, 0, 0)
    )
    short, long = (megatron_run_create_data(options).stream("train", 8, 5, samples) for samples in (10, 10_000))
    assert short is not None
    assert long is not None
    assert len(short) == len(long)  # data.samples decides, so that a run that is extended goes on with the same samples
    for index in range(len(short)):
        np.testing.assert_array_equal(short[index]["tokens"], long[index + len(long)]["tokens"])
