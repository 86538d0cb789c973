"""The suite of kind data notices a source that breaks the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from megatron_run.contracts import Dataset, DataSource, Split
from megatron_run_testing.data import data_checks
from tests.contracts.conformance import failures


class Counting(DataSource):
    """Conforms; the broken ones below change one thing each."""

    vocab_size = 8

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        return [self.sample(sequence_length) for _ in range(3)]

    def sample(self, length: int) -> Mapping[str, Any]:
        tokens = np.arange(length) % 8
        return {"tokens": tokens, "labels": (tokens + 1) % 8, "loss_mask": np.ones(length, np.float32)}


class NoSamples(Counting):
    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        return []


class NoMask(Counting):
    def sample(self, length: int) -> Mapping[str, Any]:
        return {name: value for name, value in super().sample(length).items() if name != "loss_mask"}


class TooLong(Counting):
    def sample(self, length: int) -> Mapping[str, Any]:
        return super().sample(length + 1)


class WideMask(Counting):
    def sample(self, length: int) -> Mapping[str, Any]:
        return {**super().sample(length), "loss_mask": np.ones(length)}


class BeyondVocabulary(Counting):
    vocab_size = 7


class Restless(Counting):
    calls = 0

    def sample(self, length: int) -> Mapping[str, Any]:
        self.calls += 1
        return {**super().sample(length), "labels": np.full(length, self.calls // 6 % 8)}


class NegativeBaseline(Counting):
    def baselines(self, sequence_length: int, seed: int, samples: Sequence[int]) -> Mapping[str, float]:
        return {"nonsense": -1.0}


class OneWay(Counting):
    def encode(self, text: str) -> list[int]:
        return [0]


class Overflowing(Counting):
    def encode(self, text: str) -> list[int]:
        return [8]


class Ordered(Counting):
    """Has an order of its own, which ends with the epoch."""

    def stream(self, split: Split, sequence_length: int, seed: int, samples: int) -> Dataset:
        return self.dataset(split, sequence_length, seed)


class Endless(list[Mapping[str, Any]]):
    """Goes on after its end."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index % len(self))


class Adrift(Counting):
    """Its order is another one each time that it is opened."""

    opened = 0

    def stream(self, split: Split, sequence_length: int, seed: int, samples: int) -> Dataset:
        self.opened += 1
        tokens = np.full(sequence_length, self.opened % 8)
        return Endless({**self.sample(sequence_length), "tokens": tokens} for _ in range(3))


def test_a_source_that_conforms_passes_every_check() -> None:
    assert failures(data_checks(Counting())) == {}


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (NoSamples(), "every split holds a sample", "split train has 0 samples"),
        (NoMask(), "samples have the fields of the contract", "has no loss_mask, only labels, tokens"),
        (TooLong(), "samples have the fields of the contract", "tokens is int64 [33], expected int64 [32]"),
        (WideMask(), "samples have the fields of the contract", "loss_mask is float64 [32], expected float32 [32]"),
        (BeyondVocabulary(), "token ids lie in the vocabulary", "reach from 0 to 7, the vocabulary from 0 to 6"),
        (Restless(), "a sample is the same every time", "differs in labels"),
        (NegativeBaseline(), "baselines are losses", "'nonsense' is -1.0"),
        (Adrift(), "an order of its own goes on after an epoch", "of the stream differs in tokens"),
        (Ordered(), "an order of its own goes on after an epoch", "has no next epoch"),
        (OneWay(), "text can be encoded and decoded", "decode of them gives None"),
        (Overflowing(), "text can be encoded and decoded", "encode gives [8]"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, DataSource) else None,
)
def test_the_suite_notices_a_broken_source(source: DataSource, name: str, message: str) -> None:
    assert message in failures(data_checks(source))[name]
