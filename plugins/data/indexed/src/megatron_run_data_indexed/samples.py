"""Samples cut from token streams, and the orders in which a run reads them.

s is the sequence length. A sample reads s + 1 tokens: its labels are its tokens one later. Neighbours in a stream share
a token, so that every token but the first is a label once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from megatron_run.contracts.data import DOCUMENTS, LABELS, LOSS_MASK, POSITIONS, TOKENS, Field
from megatron_run.errors import DataError
from megatron_run.errors.wording import plural
from megatron_run_data_indexed.blend import places_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run.contracts import Dataset
    from megatron_run_data_indexed.megatron_order import GPTIndex
    from megatron_run_engine.data.indexed_files import IndexedReader

T_co = TypeVar("T_co", covariant=True)
#: Rounds of a permutation: four suffice with random functions (Luby and Rackoff 1988), and the hash is a cheap one.
_ROUNDS = 8
#: Places permuted at once: a run reads in ascending order, and NumPy's cost per call is shared.
_BLOCK = 1024


class Ordered(Protocol[T_co]):
    """Samples in an order. ``len`` is the number before one is repeated; what is read by ascending index has no end."""

    def __len__(self) -> int:
        """Number of different samples."""
        ...

    def __getitem__(self, index: int) -> T_co:
        """Sample ``index``."""
        ...


if TYPE_CHECKING:
    #: Samples as the tokens of each and the one that follows, [s + 1].
    Windows = Ordered[NDArray[np.int64]]


class Part:
    """A part of a dataset in the order of its file: the sequences from ``first`` to ``last`` - 1 as one stream."""

    def __init__(self, reader: IndexedReader, first: int, last: int, sequence_length: int) -> None:
        begin, end = (reader.token_at(sequence) for sequence in (first, last))
        self._tokens, self._length = reader.tokens[begin:end], sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int64)


class Joined(Generic[T_co]):
    """Samples of several datasets, one after the other."""

    def __init__(self, parts: Sequence[Ordered[T_co]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> T_co:
        part = int(np.searchsorted(self._ends, index, side="right"))
        if index < 0 or part == len(self._parts):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._parts[part][index - int(self._ends[part]) + len(self._parts[part])]


class Shuffled(Generic[T_co]):
    """All samples of ``base`` in each epoch, in an order that ``key`` and the epoch determine, without end."""

    def __init__(self, base: Ordered[T_co], *key: int) -> None:
        self._base, self._key, self._length = base, key, len(base)
        self._epoch, self._order = -1, Permutation(1)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> T_co:
        epoch, place = divmod(index, self._length)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation(self._length, *self._key, epoch)
        return self._base[self._order[place]]


class GPTSamples:
    """Samples as megatron-core's GPTDataset reads them; where they end, they start again."""

    def __init__(self, reader: IndexedReader, index: GPTIndex, sequence_length: int) -> None:
        self._reader, self._index, self._length = reader, index, sequence_length

    def __len__(self) -> int:
        return len(self._index.shuffle)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        sample = int(self._index.shuffle[index % len(self)])
        (place, begin), (last, end) = self._index.samples[sample : sample + 2].tolist()
        parts = [self._reader[sequence] for sequence in self._index.documents[place : last + 1].tolist()]
        if len(parts) == 1:
            parts[0] = parts[0][begin : end + 1]
        elif parts:
            parts[0], parts[-1] = parts[0][begin:], parts[-1][: end + 1]
        found = sum(map(len, parts))
        if found != self._length + 1:
            why = f"sample {sample} has {plural(found, 'token')}, not {self._length + 1}"
            raise DataError("the cached sample order is damaged", why=why, fix="set data.cache to another folder")
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int64)


class Blend(Generic[T_co]):
    """Samples of several endless datasets: sample i comes from dataset ``choices[i]``, and from each in its order.

    Where the choices end, they start again, and every dataset goes on.
    """

    def __init__(
        self, datasets: Sequence[Ordered[T_co]], choices: NDArray[np.int16], places: NDArray[np.int64]
    ) -> None:
        self._datasets, self._choices, self._places = datasets, choices, places
        self._counts: list[int] = np.bincount(choices, minlength=len(datasets)).tolist()

    def __len__(self) -> int:
        """Number of samples before any dataset repeats one."""
        return min(self._first_repeat(number) for number, count in enumerate(self._counts) if count)

    def _first_repeat(self, number: int) -> int:
        rounds, more = divmod(len(self._datasets[number]), int(self._counts[number]))
        return rounds * len(self._choices) + int(np.flatnonzero(self._choices == number)[more])

    def __getitem__(self, index: int) -> T_co:
        rounds, place = divmod(index, len(self._choices))
        number = int(self._choices[place])
        return self._datasets[number][rounds * self._counts[number] + int(self._places[place])]


@dataclass(frozen=True)
class SampleForm:
    """Which fields samples have. ``end`` is the token that ends a document.

    ``mask_end``: the loss does not count where the model has read ``end`` and must guess how an unrelated document
    begins. ``reset_positions``: samples have ``positions``, which start again at 0 after each ``end``.
    ``reset_attention``: samples have ``documents``, the bounds of what may be attended to together.
    """

    end: int | None = None
    mask_end: bool = False
    reset_positions: bool = False
    reset_attention: bool = False

    @property
    def names(self) -> tuple[Field, ...]:
        """The fields."""
        more = ((POSITIONS, self.reset_positions), (DOCUMENTS, self.reset_attention))
        return (TOKENS, LABELS, LOSS_MASK, *(field for field, wanted in more if wanted))

    def fields(self, window: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Return the fields of a sample from its tokens [s + 1]."""
        tokens, length = window[:-1], len(window) - 1
        mask = (tokens != self.end).astype(np.float32) if self.mask_end else np.ones(length, np.float32)
        made = {"tokens": tokens, "labels": window[1:], "loss_mask": mask}
        if not (self.reset_positions or self.reset_attention):
            return made
        begins = 1 + np.flatnonzero(tokens[:-1] == self.end)
        if self.reset_positions:
            starts = np.zeros(length, np.int64)
            starts[begins] = begins
            made["positions"] = np.arange(length) - np.maximum.accumulate(starts)
        if self.reset_attention:
            bounds = np.full(length + 1, length)  # as many as there may be, since shapes must not change
            bounds[0], bounds[1 : 1 + len(begins)] = 0, begins
            made["documents"] = bounds
        return made


class Samples:
    """A dataset of the contract: ``windows`` with their fields."""

    def __init__(self, windows: Windows, form: SampleForm) -> None:
        self._windows, self._form, self._length = windows, form, len(windows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Mapping[str, NDArray[Any]]:
        """``tokens``, ``labels``, ``positions`` int64 [s], ``loss_mask`` fp32 [s], ``documents`` int64 [s + 1]."""
        return self._form.fields(self._windows[index])


class Known:
    """``samples`` whose tokens are all in the vocabulary. Raises :class:`DataError` for one that is not."""

    def __init__(self, samples: Dataset, vocab_size: Callable[[], int]) -> None:
        self._samples, self._vocab_size = samples, vocab_size

    def __len__(self) -> int:
        return len(self._samples)

    def __str__(self) -> str:
        return str(self._samples)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[Any]]:
        """Sample ``index``."""
        sample = self._samples[index]
        ids = self._vocab_size()
        for tokens in (sample["tokens"], sample["labels"]):
            wrong = next((end for end in (int(tokens.min()), int(tokens.max())) if not 0 <= end < ids), None)
            if wrong is not None:
                raise DataError(
                    f"token {wrong} of the data is not among the {ids} ids of its vocabulary",
                    why="the files are so large that not all of them was read before the first step",
                    origin="data.paths",
                    fix="megatron-run data inspect PREFIX --check tells its file and byte",
                )
        return sample


def blend_of(datasets: Iterable[Ordered[T_co]], choices: NDArray[np.int16]) -> Blend[T_co]:
    """Return the blend of ``datasets`` by ``choices``, whose places are counted here."""
    parts = tuple(datasets)
    return Blend(parts, choices, places_in(choices, len(parts)))


class Permutation:
    """A permutation of 0..n-1, a pure function of ``key``, computed where it is asked for, without a table.

    A Feistel network permutes the numbers of 2k bits: each round adds a keyed hash of one half to the other, which can
    be undone, so no two numbers meet (Luby and Rackoff 1988). With 2k the fewest bits that hold n - 1, a number that
    lands at n or above is permuted again until it lands below (cycle walking; Black and Rogaway 2002), after 4 walks at
    most on average. The last block of results is kept.
    """

    def __init__(self, n: int, *key: int) -> None:
        self._n = n
        self._bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
        digest = blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)
        self._block, self._results = -1, np.empty(0, np.int64)

    def __getitem__(self, place: int) -> int:
        """Return the number at ``place``. Raises IndexError beyond the last."""
        if not 0 <= place < self._n:
            raise IndexError(f"place {place} of {self._n}")
        block, offset = divmod(place, _BLOCK)
        if block != self._block:
            self._results = self.at(np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self._n)))
            self._block = block
        return int(self._results[offset])

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers at ``places`` [k], all of which are below n."""
        results = self._network(places.astype(np.uint64))
        while (outside := np.flatnonzero(results >= self._n)).size:
            results[outside] = self._network(results[outside])
        return results.astype(np.int64)

    def _network(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mask = (np.uint64(1) << self._bits) - np.uint64(1)
        high, low = numbers >> self._bits, numbers & mask
        for key in self._keys:
            high, low = low, high ^ (_hashed(low + key) >> (np.uint64(64) - self._bits))
        return (high << self._bits) | low


def _hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return ``numbers`` mixed by splitmix64's finaliser (Steele, Lea and Flood 2014); its high bits are the best."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
