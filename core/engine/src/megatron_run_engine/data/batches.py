"""The fields of a batch as tensors on the device."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_run.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from megatron_run.contracts.data import Dataset


@lru_cache(maxsize=4)  # a pure function, remembered: train and validation each read one epoch, or two at its seam
def epoch_order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples ``0..length-1`` in the order of ``epoch``, read-only, [length].

    They are sorted by the raw output of PCG64 seeded with (seed, epoch), which NumPy promises never to change, unlike
    the methods of its ``Generator``: a run may be resumed under another version.
    """
    order = np.argsort(np.random.PCG64([seed, epoch]).random_raw(length), kind="stable")
    order.setflags(write=False)
    return order


def sample_index(length: int, seed: int, position: int) -> int:
    """The sample at ``position`` of the stream over ``length`` samples; epoch = position // length."""
    epoch, offset = divmod(position, length)
    return int(epoch_order(length, seed, epoch)[offset])


class SampleStream:
    """An endless shuffled stream over a dataset, read by position: ``seed`` fixes the order of every epoch."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._length = len(dataset)

    def fields(self, positions: Iterable[int], names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """The fields ``names`` of the samples at ``positions``, each [b, s] on ``device``.

        Raises :class:`DataError` when a sample lacks a field.
        """
        return fields(
            self._dataset, [sample_index(self._length, self._seed, position) for position in positions], names, device
        )


def fields(dataset: Dataset, indices: Sequence[int], names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """The fields ``names`` of samples ``indices``, each [b, s] on ``device``; nothing is read when no name is asked.

    Raises :class:`DataError` when a sample lacks a field.
    """
    if not names:
        return {}
    samples = [dataset[index] for index in indices]
    missing = [name for name in names if name not in samples[0]]
    if missing:
        raise DataError(
            f"the data has no field {missing[0]!r}", why=f"its samples hold {', '.join(sorted(samples[0]))}"
        )
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])).to(device) for name in names}
