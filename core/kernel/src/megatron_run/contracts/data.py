"""The contract of kind ``data``: samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

Split = Literal["train", "validation", "test"]


class Dataset(Protocol):
    """An indexable set of samples of equal length, in an order that never changes."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        """Sample ``index``: ``tokens`` and ``labels`` int64 [s], ``loss_mask`` fp32 [s]."""
        ...


class DataSource(ABC):
    """Opens the datasets of a run.

    Every rank creates the source at start-up, so its constructor must be cheap; files are read when a split is opened.
    Data must depend only on the options and the arguments, never on the rank: the trainer distributes samples by index.

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
        """Open ``split``, with samples of ``sequence_length`` tokens in an order that depends on ``seed``.

        Raises :class:`megatron_run.errors.DataError` with file and offset if the data cannot be read.
        """

    def stream(self, split: Split, sequence_length: int, seed: int, samples: int) -> Dataset | None:
        """Open ``split`` in an order of its own, or return None: then the trainer shuffles :meth:`dataset` each epoch.

        The sample at index i is the i-th that the run reads; the length is that of one epoch, and indices beyond it go
        on with the next. ``samples`` is how many the run will read. Raises as :meth:`dataset`.
        """
        return None

    def baselines(self, sequence_length: int, seed: int, samples: Sequence[int]) -> Mapping[str, float]:
        """Losses of simple models by name, in nats per token, on ``samples`` of the validation split; empty by default.

        The model is evaluated on the same samples, so its loss can be compared with these.
        """
        return {}

    @property
    def tokenizer_file(self) -> Path | None:
        """The JSON file of the `tokenizers` library that makes tokens of text, None without one.

        It is kept beside the weights, and weights that were trained with another one are refused.
        """
        return None

    def encode(self, text: str) -> Sequence[int] | None:
        """Token ids of ``text``, or None if the data is not text."""
        return None

    def decode(self, tokens: Sequence[int]) -> str | None:
        """The text of ``tokens``, or None if the data is not text."""
        return None

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document, None if there is none."""
        return None
