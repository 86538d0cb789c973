"""The order of megatron-core's GPTDataset: its three indices for one split of one dataset, made with NumPy alone.

``documents`` int32 [epochs * m]: the sequences of the split, shuffled. Laid end to end they are a stream of tokens.
``samples`` [n + 1, 2]: where sample i begins in it, as a place in ``documents`` and a token of that sequence.
``shuffle`` [n]: which sample is read i-th.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_run.errors import DataError
from megatron_run_data_indexed.blend import normalised
from megatron_run_data_indexed.cache import within

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A last epoch of which less than this share is needed is shuffled apart, so that the epochs before stay whole.
_WHOLE_ENOUGH = 0.80

#: What is built for a dataset of a blend beyond its share of the samples.
_SURPLUS = 0.005


class GPTIndex(NamedTuple):
    """The three indices; see the module."""

    documents: NDArray[np.int32]
    samples: NDArray[Any]
    shuffle: NDArray[Any]


def split_bounds(shares: Sequence[float], number: int) -> tuple[tuple[int, int], ...]:
    """Return where each of train, validation and test begins and ends among ``number`` documents, as there."""
    ends = accumulate(normalised(shares).tolist(), initial=0.0)
    return tuple(pairwise(round(end * float(number)) for end in ends))


def samples_of_each(weights: Sequence[float], samples: int) -> tuple[int, list[int]]:
    """Return the size of a blend of which ``samples`` are asked for, and the samples to build of each dataset."""
    wanted = [ceil(samples * share) for share in normalised(weights).tolist()]
    return sum(wanted), [ceil(each * (1 + _SURPLUS)) for each in wanted]


def build(
    lengths: NDArray[np.int32], bounds: tuple[int, int], sequence_length: int, samples: int | None, seed: int
) -> GPTIndex:
    """Return the indices of at least ``samples`` samples over whole epochs; None: one epoch.

    ``lengths`` are those of all sequences, and ``bounds`` the split's part of them. Raises :class:`DataError` for a
    split without a token.
    """
    first, last = bounds
    per_epoch, epochs = _epochs(lengths, bounds, sequence_length, samples)
    apart, before_last = _last_epoch_apart(per_epoch, epochs, sequence_length, samples)
    state = np.random.RandomState(seed)  # its streams are frozen for ever, and they are megatron-core's
    documents = _shuffled_documents(first, last, epochs, state, apart=apart)
    places = _sample_starts(lengths, documents, sequence_length, epochs * per_epoch)
    number = len(places) - 1
    return GPTIndex(documents, places, _shuffle(before_last if apart else number, number, state))


def fits(
    index: GPTIndex, lengths: NDArray[np.int32], bounds: tuple[int, int], sequence_length: int, samples: int | None
) -> bool:
    """Whether ``index`` can be what :func:`build` returns: its kinds and shapes, and no number that leads outside."""
    first, last = bounds
    per_epoch, epochs = _epochs(lengths, bounds, sequence_length, samples)
    count, number = epochs * (last - first), (epochs * per_epoch - 1) // sequence_length
    longest, kind = int(lengths[first:last].max()), _kind_of_places(count)
    return (
        within(index.documents, (np.int32, (count,)), first, last)
        and index.samples.shape == (number + 1, 2)
        and within(index.samples[:, 0], (kind, (number + 1,)), 0, count)
        and within(index.samples[:, 1], (kind, (number + 1,)), 0, longest + 1)
        and within(index.shuffle, (_kind_of_samples(number), (number,)), 0, number)
    )


def _epochs(
    lengths: NDArray[np.int32], bounds: tuple[int, int], sequence_length: int, samples: int | None
) -> tuple[int, int]:
    """Return the tokens of an epoch, and the number of epochs that ``samples`` need."""
    first, last = bounds
    per_epoch = int(lengths[first:last].sum(dtype=np.int64))
    if not per_epoch:
        raise DataError("the split holds no token", why=f"it has {last - first} sequences")
    wanted = 0 if samples is None else samples * sequence_length + 1
    return per_epoch, max(1, -(-wanted // per_epoch))


def _kind_of_places(documents: int) -> type[np.signedinteger[Any]]:
    return np.int32 if documents <= np.iinfo(np.int32).max else np.int64


def _kind_of_samples(number: int) -> type[np.integer[Any]]:
    return np.uint32 if number < np.iinfo(np.uint32).max - 1 else np.int64


def _last_epoch_apart(per_epoch: int, epochs: int, sequence_length: int, samples: int | None) -> tuple[bool, int]:
    """Return whether the last epoch is shuffled apart, and the number of samples before it."""
    before_last = ((epochs - 1) * per_epoch - 1) // sequence_length
    if epochs == 1 or samples is None:
        return False, before_last
    whole = (per_epoch - 1) // sequence_length
    return samples - before_last < int(_WHOLE_ENOUGH * whole), before_last


def _shuffled_documents(
    first: int, last: int, epochs: int, state: np.random.RandomState, *, apart: bool
) -> NDArray[np.int32]:
    """Return the sequences of every epoch, shuffled over all epochs, or over all but the last and then the last."""
    documents = np.tile(np.arange(first, last, dtype=np.int32), epochs)
    whole = len(documents) - (last - first) if apart else len(documents)
    state.shuffle(documents[:whole])
    if apart:
        state.shuffle(documents[whole:])
    return documents


def _sample_starts(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], sequence_length: int, tokens: int
) -> NDArray[Any]:
    """Return ``samples``. Sample i begins at token i * s of the stream and shares its last token with the next."""
    bounds = np.zeros(len(documents) + 1, np.int64)  # where each sequence begins in the stream, and its end
    np.cumsum(lengths.copy().take(documents), out=bounds[1:])  # a copy, since mapped ones are not aligned
    number = (tokens - 1) // sequence_length + 1
    # Sample i lies in the sequence before which as many end at or below i * s: counting is faster than searching.
    samples_ended = bounds[1:] + (sequence_length - 1)
    samples_ended //= sequence_length
    places = np.bincount(samples_ended, minlength=number)[:number]
    np.cumsum(places, out=places)
    places[0] = 0  # though sequences without a token may come first
    samples = np.empty((number, 2), _kind_of_places(len(documents)))
    samples[:, 0] = places
    samples[:, 1] = np.arange(number, dtype=np.int64) * sequence_length - bounds[places]
    return samples


def _shuffle(before_last: int, number: int, state: np.random.RandomState) -> NDArray[Any]:
    """Return the samples shuffled, those of a last epoch that is apart after all others."""
    numbers = np.arange(number, dtype=_kind_of_samples(number))
    state.shuffle(numbers[:before_last])
    if before_last < number:
        state.shuffle(numbers[before_last:])
    return numbers
