"""The shuffled order of samples, and the fields of a batch as tensors on the device."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from megatron_run.contracts.data import Dataset
from megatron_run.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    #: Takes from the rows of a field [b, *shape], given by name, what this rank computes.
    Cut = Callable[[str, Tensor], Tensor]


@lru_cache(maxsize=4)  # train and validation each read one epoch, and two where a batch crosses into the next
def epoch_order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the samples ``0..length-1`` in the order of ``epoch``, read-only, [length]."""
    # Sort by raw PCG64 output. NumPy guarantees that stream for ever, unlike Generator.permutation, and a run may be
    # resumed under another NumPy.
    order = np.argsort(np.random.PCG64([seed, epoch]).random_raw(length), kind="stable")
    order.setflags(write=False)
    return order


def sample_index(length: int, seed: int, position: int) -> int:
    """Return the sample at ``position`` of the stream over ``length`` samples. The epoch is position // length."""
    epoch, offset = divmod(position, length)
    return int(epoch_order(length, seed, epoch)[offset])


class RunSamples(Dataset, Protocol):
    """The samples of a run: those of data with an order of its own are ``in_order`` and read by ascending index."""

    in_order: bool


def sample_at(dataset: RunSamples, seed: int, position: int) -> int:
    """Return the index of the sample at ``position`` of the run: itself if they are in order."""
    return position if dataset.in_order else sample_index(len(dataset), seed, position)


class SampleStream:
    """An endless stream over a dataset, read by position. ``seed`` shuffles every epoch of data without an order.

    ``cut`` is what this rank takes of each sample, as in :func:`fields`.
    """

    def __init__(self, dataset: RunSamples, seed: int, cut: Cut | None = None) -> None:
        self._dataset, self._seed, self._cut = dataset, seed, cut

    def fields(self, positions: Iterable[int], names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """Return the fields ``names`` of the samples at ``positions``, each [b, *shape] on ``device``.

        Raises :class:`DataError` if a sample lacks a field, or has it in another shape or type than the first.
        """
        indices = [sample_at(self._dataset, self._seed, position) for position in positions]
        return fields(self._dataset, indices, names, device, self._cut)


def fields(
    dataset: Dataset,
    indices: Sequence[int],
    names: Sequence[str],
    device: torch.device,
    cut: Cut | None = None,
) -> dict[str, Tensor]:
    """Return the fields ``names`` of samples ``indices``, each [b, *shape] on ``device``; None cuts none of them.

    Raises :class:`DataError` if a sample lacks a field, or has it in another shape or type than the first.
    """
    if not names:  # a middle pipeline stage, where nothing is packed: read no sample
        return {}
    stacked = {name: torch.from_numpy(rows) for name, rows in _stacked(dataset, indices, names).items()}
    if cut is not None:
        stacked = {name: cut(name, rows) for name, rows in stacked.items()}
    if device.type == "cuda":  # a copy from other memory would make the host wait for all that it has launched so far
        return {name: field.pin_memory().to(device, non_blocking=True) for name, field in stacked.items()}
    return {name: field.to(device) for name, field in stacked.items()}


def _stacked(dataset: Dataset, indices: Sequence[int], names: Sequence[str]) -> dict[str, NDArray[np.generic]]:
    """Copy each sample into its row as it is read: one that reuses its arrays has changed when the next is read."""
    batch: dict[str, NDArray[np.generic]] = {}
    for row, index in enumerate(indices):
        sample = dataset[index]
        for name in names:
            try:
                found = sample[name]
            except KeyError:
                why = f"its samples hold {', '.join(sorted(sample))}"
                raise DataError(f"the data has no field {name!r}", why=why) from None
            if not row:
                batch[name] = np.empty((len(indices), *found.shape), found.dtype)
            place = batch[name][row, ...]  # an array, even of a field that is one number
            if found.shape != place.shape or found.dtype != place.dtype:
                forms = sorted({f"{each.dtype} {list(each.shape)}" for each in (found, place)})
                raise DataError(f"the field {name!r} is {' and '.join(forms)} in samples of one batch")
            place[...] = found
    return batch
