"""Sources that draw samples from whole texts of Megatron's indexed datasets: what all of them share.

A sample is drawn anew in each epoch, from its index and the epoch alone. A source adds what its samples are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Dataset, Split
from megatron_run.contracts.option_groups import OF_FILES
from megatron_run.errors import DataError
from megatron_run_engine.data.batches import sample_index
from megatron_run_engine.data.indexed_files import IndexedReader, files_of, open_tokens
from megatron_run_engine.data.option_types import AT_COMMAS, SPLITS, SplitShares
from megatron_run_engine.data.token_ids import require_ids
from megatron_run_engine.data.tokenized_source import TokenizedSource

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PreparedTextOptions(BaseModel):
    """The keys of section ``data`` that these sources share."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    paths: Annotated[tuple[str, ...], AT_COMMAS, OF_FILES] = Field(
        (), description="datasets, each the prefix of a .bin and .idx pair; needed"
    )
    tokenizer: Annotated[str, OF_FILES] = Field(
        "bytes", description="what made the tokens: bytes, or a file or folder, as of data prepare"
    )
    split: SplitShares = Field(
        (969, 30, 1), description="shares of train, validation and test, in any unit, by document"
    )


class DrawnSamples(ABC):
    """Samples that are drawn anew in each epoch."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Sample ``index`` as it is in ``epoch``. Raises IndexError beyond the last."""

    def __getitem__(self, index: int) -> Mapping[str, NDArray[Any]]:
        return self.sample(index, 0)


class Epochs:
    """The samples of ``drawn`` in the order of a run, without end: each epoch shuffles them and draws anew."""

    def __init__(self, drawn: DrawnSamples, seed: int) -> None:
        self._drawn, self._seed = drawn, seed

    def __len__(self) -> int:
        return len(self._drawn)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[Any]]:
        epoch = index // len(self._drawn)
        return self._drawn.sample(sample_index(len(self._drawn), self._seed, index), epoch)


class PreparedTexts(TokenizedSource):
    """The datasets that ``options`` name, for the plugin ``name``. Opened, and checked, when a split is first opened.

    Raises :class:`DataError` when they name none.
    """

    def __init__(self, options: PreparedTextOptions, name: str) -> None:
        if not options.paths:
            raise DataError(
                f"data={name} has no texts of its own",
                origin="data.paths",
                fix="make a dataset with megatron-run data prepare, and add --set data.paths=PREFIX",
            )
        super().__init__(options.tokenizer)
        self._paths, self._shares = options.paths, options.split

    @cached_property
    def readers(self) -> tuple[IndexedReader, ...]:
        """One a dataset. Raises :class:`DataError` for ids that the tokenizer does not have."""
        readers = tuple(open_tokens(path) for path in self._paths)
        require_ids(readers, self.tokenizer.vocab_size)
        return readers

    def bounds(self, reader: IndexedReader, split: Split) -> tuple[int, int]:
        """The first document of ``split``, and the one after its last."""
        ends = np.cumsum((0, *self._shares)) / sum(self._shares) * (len(reader.documents) - 1)
        place = SPLITS.index(split)
        first, last = np.round(ends[place : place + 2]).astype(int).tolist()
        return first, last

    def check_filled(self, drawn: DrawnSamples, split: Split, what: str, why: str) -> None:
        """Raise :class:`DataError` when ``split``, which has a share, holds no ``what``."""
        if self._shares[SPLITS.index(split)] and not len(drawn):
            raise DataError(
                f"the {split} split holds no {what}",
                why=why,
                origin="data.paths and data.split",
                fix=f"give {split} a larger share with data.split, or name more datasets",
            )

    @abstractmethod
    def dataset(self, split: Split, sequence_length: int, seed: int) -> DrawnSamples:
        """Open ``split`` in the order of the files, as it is in the first epoch."""

    def stream(self, split: Split, sequence_length: int, seed: int, samples: int) -> Dataset:
        """Open ``split`` shuffled; each epoch draws anew. Raises as :meth:`dataset`."""
        drawn = self.dataset(split, sequence_length, seed)
        return Epochs(drawn, seed) if len(drawn) else drawn

    @property
    def files(self) -> tuple[Path, ...]:
        """Both files of each dataset."""
        return files_of(self._paths)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; special tokens that a source added have none."""
        return self.tokenizer.decode([token for token in tokens if token < self.tokenizer.vocab_size])
