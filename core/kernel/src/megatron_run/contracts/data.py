"""The contract of kind ``data``: samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Split = Literal["train", "validation", "test"]


class Dataset(Protocol):
    """An indexable set of samples of fixed length, in an order that never changes."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        """Sample ``index``: ``tokens`` and ``labels`` int64 [s], ``loss_mask`` fp32 [s]."""
        ...


class DataSource(ABC):
    """Opens datasets. Made cheaply at start-up on every rank; files are read when a split is asked for.

    A whole working plugin::

        class Ones(DataSource):
            vocab_size = 2

            def dataset(self, split, sequence_length, seed):
                return [{"tokens": np.ones(sequence_length, int), "labels": np.ones(sequence_length, int),
                         "loss_mask": np.ones(sequence_length, "float32")}]

        @hookimpl
        def megatron_run_create_data(options):
            return Ones()
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids, unpadded."""

    @abstractmethod
    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        """Open ``split``. Raises :class:`megatron_run.errors.DataError` naming file and offset."""

    def baselines(self, sequence_length: int, seed: int, samples: Sequence[int]) -> Mapping[str, float]:
        """Losses (nats per token) of simple models on these ``samples`` of the validation split; empty by default.

        They are the samples on which the model is evaluated, so that a run can be judged by these losses.
        """
        return {}

    def encode(self, text: str) -> Sequence[int] | None:
        """Token ids of ``text``, or None when the data is not text."""
        return None

    def decode(self, tokens: Sequence[int]) -> str | None:
        """The text of ``tokens``, or None when the data is not text."""
        return None
