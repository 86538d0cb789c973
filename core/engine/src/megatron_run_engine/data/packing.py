"""Packing: rows of whole documents, between which attention and positions know the borders.

A row of s tokens holds documents that end to end fill it as well as best-fit decreasing can (Johnson 1973); what is
left is padding. Which documents share a row is a function of their lengths alone, so it is the same on every rank and
in every epoch, and the sampler shuffles rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_run.contracts.data import DOCUMENTS, LABELS, LOSS_MASK, POSITIONS, TOKENS
from megatron_run.errors.wording import plural

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The fields of :class:`PackedDocuments`.
PACKED_FIELDS = (TOKENS, LABELS, LOSS_MASK, POSITIONS, DOCUMENTS)


class Rows(NamedTuple):
    """Row i holds the pieces ``pieces[bounds[i]:bounds[i+1]]``, in this order; int64 [n] and [rows + 1]."""

    pieces: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1


def best_fit(lengths: NDArray[np.int64], capacity: int) -> Rows:
    """Pack pieces of ``lengths`` [n], each from 1 to ``capacity``, the longest first, each where it leaves least space.

    Pieces of equal length, and rows with equal space, are taken together: the loop runs over pairs of lengths and
    spaces, not over pieces.
    """
    order = np.argsort(-lengths, kind="stable")
    row_of, used = np.empty(len(order), np.int64), 0
    free: dict[int, NDArray[np.int64]] = {}  # rows by the space left in them
    spaces: list[int] = []  # the keys of ``free``, ascending

    def leave(space: int, rows: NDArray[np.int64]) -> None:
        if space and len(rows):
            if space not in free:
                insort(spaces, space)
                free[space] = rows
            else:
                free[space] = np.concatenate((free[space], rows))

    sizes, firsts = np.unique(-lengths[order], return_index=True)
    stops = [*firsts.tolist(), len(order)][1:]
    for size, start, stop in zip((-sizes).tolist(), firsts.tolist(), stops, strict=True):
        first = start
        place = bisect_left(spaces, size)
        while first < stop:
            if place < len(spaces):  # the tightest space takes as many as fit: each of them leaves a tighter one
                space = spaces.pop(place)
                rows = free.pop(space)
            else:
                space, each = capacity, capacity // size
                rows = np.arange(used, used - (first - stop) // each)
                used += len(rows)
            each = space // size
            full = min(len(rows), (stop - first) // each)
            row_of[first : first + full * each] = rows[:full].repeat(each)
            first += full * each
            rest, rows = rows[full:], rows[:full]
            if first < stop and len(rest):  # the last few, which fill no row to the same space
                row_of[first:stop] = rest[0]
                leave(space - (stop - first) * size, rest[:1])
                first, rest = stop, rest[1:]
            leave(space, rest)
            leave(space - each * size, rows)
            place = bisect_left(spaces, size)
    by_row = np.argsort(row_of, kind="stable")
    return Rows(order[by_row], np.searchsorted(row_of[by_row], np.arange(used + 1)).astype(np.int64))


def one_a_row(lengths: NDArray[np.int64], capacity: int) -> Rows:  # noqa: ARG001  # of the form of best_fit
    """Give each piece a row of its own."""
    return Rows(np.arange(len(lengths)), np.arange(len(lengths) + 1))


class PackedDocuments:
    """Rows of ``length`` tokens that hold whole documents: document i is ``stream[bounds[i]:bounds[i+1]]``.

    Every token of a document but its first is a label once. A document of more than ``length`` labels is cut into
    pieces, which count as documents from there on; ``cut`` is their number, ``documents`` that of documents with a
    label. ``counts`` [len(stream)] says which tokens count as labels, all by default. ``padding`` is the token behind
    the last document of a row: a document by itself, and no label. ``stream`` may be memory-mapped: a row reads its own
    slices of it.
    """

    def __init__(
        self,
        stream: NDArray[Any],
        bounds: NDArray[np.int64],
        length: int,
        *,
        padding: int,
        counts: NDArray[Any] | None = None,
        fit: Callable[[NDArray[np.int64], int], Rows] = best_fit,
    ) -> None:
        self._stream, self._counts, self._length, self._padding = stream, counts, length, padding
        labels = np.diff(bounds) - 1
        begins, labels = bounds[:-1][labels > 0].astype(np.int64), labels[labels > 0].astype(np.int64)
        pieces = -(-labels // length)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece in its document
        self._begins = np.repeat(begins, pieces) + number * length
        self._sizes = np.minimum(length, np.repeat(labels, pieces) - number * length)
        self._rows = fit(self._sizes, length)
        self.documents, self.cut = len(labels), int((pieces > 1).sum())
        #: How many documents a row holds at most, padding among them. Shapes must not change.
        self.most = int(np.diff(self._rows.bounds).max(initial=0)) + 1

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fill(self) -> float:
        """The share of all rows' tokens that is not padding; 0 without a row."""
        return float(self._sizes.sum() / max(1, len(self) * self._length))

    def __str__(self) -> str:
        counts = f"{plural(self.documents, 'document')} in {plural(len(self), 'row')} of {self._length} tokens"
        return f"{counts}, {self.fill:.1%} full" + (f"; {self.cut} longer than a row were cut" if self.cut else "")

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        """``tokens``, ``labels``, ``positions`` int64 [s], ``loss_mask`` fp32 [s], ``documents`` int64 [most + 1]."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        tokens = np.full(self._length, self._padding, np.int64)
        labels, mask, positions = tokens.copy(), np.zeros(self._length, np.float32), np.zeros(self._length, np.int64)
        documents, start = [0], 0
        for piece in self._pieces(index):
            first, stop = int(self._begins[piece]), start + int(self._sizes[piece])
            window = np.asarray(self._stream[first : first + stop - start + 1])
            tokens[start:stop], labels[start:stop] = window[:-1], window[1:]
            mask[start:stop] = 1 if self._counts is None else self._counts[first + 1 : first + stop - start + 1]
            positions[start:stop] = np.arange(stop - start)
            documents.append(stop)
            start = stop
        positions[start:] = np.arange(self._length - start)
        documents += [self._length] * (self.most + 1 - len(documents))
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": mask,
            "positions": positions,
            "documents": np.array(documents, np.int64),
        }

    def _pieces(self, index: int) -> Sequence[int]:
        pieces: list[int] = self._rows.pieces[self._rows.bounds[index] : self._rows.bounds[index + 1]].tolist()
        return pieces

    def pairs(self, samples: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of ``samples`` whose labels count, and these labels, in their order, both [n]."""
        rows = [self[index] for index in samples]
        counts = np.concatenate([row["loss_mask"] for row in rows]) > 0
        tokens, labels = (np.concatenate([row[name] for row in rows])[counts] for name in ("tokens", "labels"))
        return tokens.astype(np.int64), labels.astype(np.int64)


def same_shape(datasets: Sequence[PackedDocuments]) -> None:
    """Give the rows of ``datasets``, which may share a batch, ``documents`` of one length."""
    most = max(dataset.most for dataset in datasets)
    for dataset in datasets:
        dataset.most = most


def bounds_of(stream: NDArray[Any], end: int) -> NDArray[np.int64]:
    """The bounds [n + 1] of the documents of ``stream``, each of which ends with the token ``end``."""
    return np.concatenate(([0], np.flatnonzero(stream == end) + 1)).astype(np.int64)
