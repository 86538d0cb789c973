"""Samples: ``[CLS] A [SEP] B [SEP]`` of two neighbouring texts, in order or swapped, some of their words hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run_data_sentence_pairs.masking import Draws
from megatron_run_engine.data import DrawnSamples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_data_sentence_pairs.masking import Masking
    from megatron_run_data_sentence_pairs.vocabulary import PairVocabulary
    from megatron_run_engine.data.indexed_files import IndexedReader

#: Special tokens of a sample.
SPECIALS = 3
#: The share of samples that are shorter than they could be, so that short texts are met as well (Devlin et al. 2018).
SHORT = 0.1
#: A document's rest of fewer tokens is left out: it makes no two texts worth telling apart.
LEAST = 8


class Documents:
    """Documents ``first`` to ``last`` - 1 of a dataset, cut into pieces of ``room`` tokens; a rest is one too."""

    def __init__(self, reader: IndexedReader, first: int, last: int, room: int) -> None:
        self._reader, self._room = reader, room
        bounds = np.asarray(reader.documents[first : last + 1], np.int64)
        ends = np.concatenate(([0], np.cumsum(reader.lengths[bounds[0] : bounds[-1]], dtype=np.int64)))
        self._starts = ends[bounds - bounds[0]] + reader.token_at(int(bounds[0]))  # [documents + 1], in tokens
        sizes = np.diff(self._starts)
        self._stops = np.cumsum(sizes // room + (sizes % room >= LEAST))  # pieces up to and with each document
        self._sentences = ends[1:-1] + self._starts[0] if len(ends) > len(bounds) else None

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def piece(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens of piece ``index`` [n], and the places within it at which sequences of the dataset begin."""
        document = int(np.searchsorted(self._stops, index, side="right"))
        before = int(self._stops[document - 1]) if document else 0
        start = int(self._starts[document]) + (index - before) * self._room
        stop = min(start + self._room, int(self._starts[document + 1]))
        tokens = self._reader.tokens[start:stop].astype(np.int64)
        if self._sentences is None:
            return tokens, np.empty(0, np.int64)
        begin, end = np.searchsorted(self._sentences, (start + 1, stop))
        return tokens, self._sentences[begin:end] - start


class Pairs(DrawnSamples):
    """One sample for each piece of ``parts``; all that is drawn for it follows from ``key``, epoch and index."""

    def __init__(
        self,
        parts: Sequence[Documents],
        vocabulary: PairVocabulary,
        masking: Masking,
        length: int,
        key: tuple[int, ...],
    ) -> None:
        self._parts, self._vocabulary, self._masking = parts, vocabulary, masking
        self._length, self._key = length, key
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sample(self, index: int, epoch: int) -> dict[str, NDArray[Any]]:
        """Sample ``index`` as it is in ``epoch``. Raises IndexError beyond the last."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = int(np.searchsorted(self._ends, index, side="right"))
        tokens, sentences = self._parts[part].piece(index - int(self._ends[part]) + len(self._parts[part]))
        if tokens[-1] == self._vocabulary.end_of_document:
            tokens = tokens[:-1]
        draws = Draws(*self._key, epoch, index)
        if draws.uniform() < SHORT:
            tokens = tokens[: LEAST + draws.below(max(1, len(tokens) - LEAST))]
        cut, swapped = self._cut(tokens, sentences, draws), draws.uniform() < 0.5
        texts = (tokens[cut:], tokens[:cut]) if swapped else (tokens[:cut], tokens[cut:])
        return self._laid_out(texts, draws, swapped=swapped)

    def _cut(self, tokens: NDArray[np.int64], sentences: NDArray[np.int64], draws: Draws) -> int:
        """Where the second text begins: at the sentence that begins nearest to a place that is drawn, or there."""
        drawn = 1 + draws.below(max(1, len(tokens) - 1))
        ends = np.flatnonzero(self._vocabulary.ends[tokens]) + 1
        places = sentences if len(sentences) else ends
        places = places[places < len(tokens)]
        return int(places[np.argmin(np.abs(places - drawn))]) if len(places) else drawn

    def _laid_out(
        self, texts: tuple[NDArray[np.int64], NDArray[np.int64]], draws: Draws, *, swapped: bool
    ) -> dict[str, NDArray[Any]]:
        first, second, vocabulary = *texts, self._vocabulary
        end, used = len(first) + 1, len(first) + len(second) + SPECIALS  # of the first text, and of the sample
        labels = np.full(self._length, vocabulary.padding, np.int64)
        labels[0], labels[1:end], labels[end] = vocabulary.begin, first, vocabulary.separator
        labels[end + 1 : used - 1], labels[used - 1] = second, vocabulary.separator
        tokens, chosen = self._masking.apply(labels, ((1, end), (end + 1, used - 1)), draws)
        types = np.zeros(self._length, np.int64)
        types[end + 1 : used] = 1
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": chosen.astype(np.float32),
            "token_types": types,
            "documents": np.array((0, used, self._length), np.int64),
            "swapped": np.array(int(swapped), np.int64),
        }
