"""data=counted: the samples of data=mock, of which each rank writes down those that it reads to train on.

A line an index, in ``reads/ATTEMPT-RANK`` of the run folder that the option ``folder`` names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from megatron_run.contracts import Dataset, DataSource, PluginInfo, Split
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.builtin.data.mock import Mock, MockOptions


class Options(MockOptions):
    folder: str = Field(description="the run folder")


class Counted:
    def __init__(self, samples: Dataset, folder: Path) -> None:
        self._samples, self._folder = samples, folder
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if self._file is None:
            attempt = max(path.name for path in (self._folder / "logs").glob("attempt-*"))
            (self._folder / "reads").mkdir(exist_ok=True)
            name = f"{int(attempt.partition('-')[2])}-{os.environ.get('RANK', '0')}"
            self._file = os.open(self._folder / "reads" / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(self._file, f"{index}\n".encode())  # a rank that is killed has written it
        return self._samples[index]


class CountedData(Mock):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._folder = Path(options.folder)

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        samples = super().dataset(split, sequence_length, seed)
        return Counted(samples, self._folder) if split == "train" else samples


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("data", "counted", options=Options)


@hookimpl
def megatron_run_create_data(options: Options) -> DataSource:
    return CountedData(options)
