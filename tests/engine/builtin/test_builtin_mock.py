"""data=mock: pure, learnable, and with the baselines it claims."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_run.contracts import Dataset, Split
from megatron_run.planning import load_config
from megatron_run_engine.builtin.data.mock import NOISE, MockOptions, megatron_run_create_data


def opened(split: Split = "train", seed: int = 1, length: int = 64, **options: int) -> Dataset:
    return megatron_run_create_data(MockOptions(**options)).dataset(split, length, seed)


def test_a_sample_follows_from_seed_split_and_index_alone() -> None:
    first = opened()
    samples = [first[index]["tokens"].tolist() for index in (0, 5, 9)]
    again = opened()
    assert [again[index]["tokens"].tolist() for index in (9, 5, 0)] == samples[::-1]
    assert opened(samples=10)[9]["tokens"].tolist() == samples[2]


def test_samples_splits_and_seeds_differ() -> None:
    found = [opened()[0], opened()[1], opened("validation")[0], opened("test")[0], opened(seed=2)[0]]
    assert len({tuple(sample["tokens"]) for sample in found}) == 5


def test_labels_are_the_next_tokens() -> None:
    sample = opened()[3]
    assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()


def test_the_size_is_what_was_asked_for() -> None:
    assert len(opened(samples=12)) == 12
    with pytest.raises(IndexError):
        opened(samples=12)[12]


def test_the_next_token_is_known_but_for_the_noise() -> None:
    """The table of the likeliest successor, learned from training samples, holds in validation."""
    counts = np.zeros((16, 16))
    for index in range(200):
        sample = opened(vocab_size=16)[index]
        for token, label in zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True):
            counts[token, label] += 1
    held_out = [opened("validation", vocab_size=16)[index] for index in range(200)]
    right = np.mean([counts.argmax(1)[sample["tokens"]] == sample["labels"] for sample in held_out])
    assert right == pytest.approx(1 - NOISE * 15 / 16, abs=0.01)
    assert sorted(counts.argmax(1)) == list(range(16))


def test_the_perfect_model_is_the_empirical_entropy() -> None:
    baselines = megatron_run_create_data(MockOptions(vocab_size=8)).baselines(64, 1, [0])
    assert baselines["uniform guess"] == math.log(8)
    counts = np.zeros((8, 8))
    for index in range(1500):
        sample = opened(vocab_size=8)[index]
        for token, label in zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True):
            counts[token, label] += 1
    rows = counts / counts.sum(1, keepdims=True)
    entropy = -(counts / counts.sum() * np.log(rows)).sum()
    assert baselines["perfect model"] == pytest.approx(entropy, abs=0.01)


def test_text_that_is_asked_of_it_is_refused_in_a_notice() -> None:
    said = "eval.sample=9 does nothing with data=mock: its tokens are no text"
    assert said in load_config("preset:tiny", sets=("eval.sample=9",)).notices
    assert said not in load_config("preset:tiny").notices
