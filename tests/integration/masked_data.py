"""A data plugin in one file: random tokens of which a random share counts, another one in each sample."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Dataset, DataSource, PluginInfo, Split
from megatron_run.hookspecs import hookimpl


class Options(BaseModel):
    """How many ids there are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(61, ge=2, description="number of token ids")


class Masked:
    """64 samples."""

    def __init__(self, vocab_size: int, sequence_length: int) -> None:
        self._vocab_size, self._length = vocab_size, sequence_length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        random = np.random.default_rng(index)
        tokens = random.integers(0, self._vocab_size, self._length + 1)
        counts = random.random(self._length) < (0.05, 0.95)[index % 2]
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": counts.astype(np.float32)}


class MaskedData(DataSource):
    """The same samples for every split."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        return Masked(self._vocab_size, sequence_length)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("data", "masked_data", options=Options)


@hookimpl
def megatron_run_create_data(options: Options) -> DataSource:
    """Make the source."""
    return MaskedData(options.vocab_size)
