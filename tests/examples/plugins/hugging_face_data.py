"""Text columns of the `datasets` library: `pip install datasets`, then name a folder that its `save_to_disk` wrote.

Tokenised once, in batches; the library keeps the samples in its cache and maps them into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import datasets
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Dataset, DataSource, PluginInfo, Split
from megatron_run.errors import DataError
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.data import TokenizedSource, open_tokenizer


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(description="folder of a saved DatasetDict with the splits train, validation and test")
    column: str = Field("text", description="column to train on")
    tokenizer: str = Field("bytes", description="bytes, or a tokenizer's file or folder")


def cut(texts: Sequence[str], tokenizer: str, length: int) -> Mapping[str, NDArray[np.int64]]:
    """Join ``texts`` and cut samples of ``length`` tokens, each with the one that follows: [n, length + 1]."""
    opened = open_tokenizer(tokenizer)
    tokens = [opened.encode(text.encode(), "a row") for text in texts]
    stream = np.concatenate([np.append(one, opened.end_of_document) for one in tokens]).astype(np.int64)
    starts = length * np.arange((len(stream) - 1) // length)
    return {"window": stream[starts[:, None] + np.arange(length + 1)]}


class Samples:
    def __init__(self, windows: datasets.Dataset) -> None:
        self._windows = windows.with_format("numpy")

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = self._windows[index]["window"]
        return {"tokens": window[:-1], "labels": window[1:], "loss_mask": np.ones(len(window) - 1, np.float32)}


class Columns(TokenizedSource):
    def __init__(self, options: Options) -> None:
        super().__init__(options.tokenizer)
        self._options = options

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        try:
            rows = datasets.load_from_disk(self._options.path)[split]
        except (FileNotFoundError, KeyError) as error:
            raise DataError(f"no split {split} of {self._options.path}: {error}", origin="data.path") from None
        asked = {"tokenizer": self._options.tokenizer, "length": sequence_length}
        column = self._options.column
        return Samples(
            rows.map(cut, batched=True, input_columns=column, remove_columns=rows.column_names, fn_kwargs=asked)
        )


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("data", "columns", options=Options)


@hookimpl
def megatron_run_create_data(options: Options) -> DataSource:
    return Columns(options)
