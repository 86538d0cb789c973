"""The suite of kind data notices a source that breaks the contract."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
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


class Indexed(Counting):
    """Its samples differ, and ``start`` says how."""

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        return [self.row(self.start(index), sequence_length) for index in range(16)]

    def start(self, index: int) -> int:
        return index

    def row(self, start: int, length: int) -> Mapping[str, Any]:
        tokens = (start + np.arange(length)) % 8
        return {"tokens": tokens, "labels": (tokens + 1) % 8, "loss_mask": np.ones(length, np.float32)}


class Sharded(Indexed):
    def start(self, index: int) -> int:
        return index * int(os.environ.get("WORLD_SIZE", "1")) + int(os.environ.get("RANK", "0"))


class Shorter(Indexed):
    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        return [self.sample(sequence_length)] * (16 // int(os.environ.get("WORLD_SIZE", "1")))


class Hashed(Indexed):
    def start(self, index: int) -> int:
        return hash(f"sample {index}")


class HashedStream(Indexed):
    def stream(self, split: Split, sequence_length: int, seed: int, samples: int) -> Dataset:
        return Endless(self.row(hash(f"sample {index}"), sequence_length) for index in range(16))


class OfItsMaker(Indexed):
    """Takes the rank when it is made, and so tells nothing where it is sent as it is."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))

    def start(self, index: int) -> int:
        return index + self.rank


class Absent(Indexed):
    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        if "RANK" in os.environ:
            raise KeyError("only the first rank has data")
        return super().dataset(split, sequence_length, seed)


class Buffered(list[Mapping[str, Any]]):
    """Every sample in the same arrays."""

    def __getitem__(self, index: Any) -> Any:
        sample, buffers = super().__getitem__(index), super().__getitem__(0)
        for name, value in sample.items():
            buffers[name][:] = value
        return buffers


class Reusing(Indexed):
    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        return Buffered(self.row(index, sequence_length) for index in (0, *range(16)))


class Weighted(Counting):
    def sample(self, length: int) -> Mapping[str, Any]:
        return {**super().sample(length), "loss_mask": np.full(length, 2, np.float32)}


class UnknownMask(Counting):
    def sample(self, length: int) -> Mapping[str, Any]:
        return {**super().sample(length), "loss_mask": np.full(length, np.nan, np.float32)}


class ListedMask(Counting):
    def sample(self, length: int) -> Mapping[str, Any]:
        return {**super().sample(length), "loss_mask": [1.0] * length}


class NegativeBaseline(Counting):
    def baselines(self, sequence_length: int, seed: int, samples: Sequence[int]) -> Mapping[str, float]:
        return {"nonsense": -1.0}


class OneWay(Counting):
    def encode(self, text: str) -> list[int]:
        return [0]


class Overflowing(Counting):
    def encode(self, text: str) -> list[int]:
        return [8]


class Elsewhere(Counting):
    files = (Path("texts/gone.jsonl"),)


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
    assert failures(data_checks(Indexed(), create=Indexed)) == {}


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (NoSamples(), "every split holds a sample", "split train has 0 samples"),
        (NoMask(), "samples have the fields of the contract", "has no loss_mask, only labels, tokens"),
        (TooLong(), "samples have the fields of the contract", "tokens is int64 [33], expected int64 [32]"),
        (WideMask(), "samples have the fields of the contract", "loss_mask is float64 [32], expected float32 [32]"),
        (BeyondVocabulary(), "token ids lie in the vocabulary", "reach from 0 to 7, the vocabulary from 0 to 6"),
        (Weighted(), "the loss mask is 0 or 1", "train sample 0: loss_mask[0] is 2.0, and must be 0 or 1"),
        (UnknownMask(), "the loss mask is 0 or 1", "train sample 0: loss_mask[0] is nan, and must be 0 or 1"),
        (ListedMask(), "samples have the fields of the contract", "loss_mask is a list, expected an array"),
        (Reusing(), "a sample keeps its values when others are read", "changes in tokens when another is read"),
        (Sharded(), "every rank finds the same samples", "train sample 0 differs in tokens in a process with RANK=3 "),
        (Shorter(), "every rank finds the same samples", "train has 16 samples, and 4 in a process with RANK=3 "),
        (Hashed(), "every rank finds the same samples", "differs in tokens in a process with "),
        (HashedStream(), "every rank finds the same samples", "differs in tokens in a process with RANK=3 "),
        (Absent(), "every rank finds the same samples", "only the first rank has data"),
        (Restless(), "a sample is the same every time", "differs in labels"),
        (NegativeBaseline(), "baselines are losses", "'nonsense' is -1.0"),
        (Adrift(), "an order of its own goes on after an epoch", "of the stream differs in tokens"),
        (Ordered(), "an order of its own goes on after an epoch", "has no next epoch"),
        (Elsewhere(), "the files of the samples can be read", "files names texts/gone.jsonl, which is no file"),
        (OneWay(), "text can be encoded and decoded", "decode of them gives None"),
        (Overflowing(), "text can be encoded and decoded", "encode gives [8]"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, DataSource) else None,
)
def test_the_suite_notices_a_broken_source(source: DataSource, name: str, message: str) -> None:
    (check,) = (check for check in data_checks(source) if check.name == name)
    assert message in failures([check])[name]


def test_nan_in_a_mask_is_not_said_to_change() -> None:
    assert set(failures(data_checks(UnknownMask()))) == {"the loss mask is 0 or 1"}


def test_what_a_source_takes_from_its_rank_when_it_is_made_is_found_where_it_can_be_made_anew() -> None:
    name = "every rank finds the same samples"
    assert "differs in tokens" in failures(data_checks(OfItsMaker(), create=OfItsMaker))[name]
    assert failures(data_checks(OfItsMaker())) == {}


def test_a_source_that_cannot_be_sent_is_not_called_the_same_on_every_rank() -> None:
    class Local(Counting):
        pass

    (check,) = (check for check in data_checks(Local()) if check.name == "every rank finds the same samples")
    assert "it cannot be sent to another process: " in (check.run() or "")
