"""Samples that count: each begins at its own index and goes on by one, modulo the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Dataset, DataSource, PluginInfo, Split
from megatron_run.hookspecs import hookimpl


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(16, ge=2, description="number of token ids")


class Counts:
    def __init__(self, vocab_size: int, sequence_length: int) -> None:
        self._vocab_size, self._length = vocab_size, sequence_length

    def __len__(self) -> int:
        return self._vocab_size

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = np.arange(index, index + self._length + 1, dtype=np.int64) % self._vocab_size
        return {"tokens": window[:-1], "labels": window[1:], "loss_mask": np.ones(self._length, np.float32)}


class Counting(DataSource):
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        return Counts(self._vocab_size, sequence_length)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("data", "counting", options=Options)


@hookimpl
def megatron_run_create_data(options: Options) -> DataSource:
    return Counting(options.vocab_size)
