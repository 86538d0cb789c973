"""The content of an indexed dataset: counts, lengths, samples as text; and a check that reads all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_run_data_indexed.preparation.about import made_with, read_about
from megatron_run_engine.data import Tokenizer, open_tokenizer
from megatron_run_engine.data.indexed_files import IndexedReader, tokens_path

#: Tokens of a sample that are shown.
SHOWN = 100


@dataclass(frozen=True)
class Summary:
    """Counts of a dataset, and its lengths in tokens a document.

    ``bins``: (first length, last length, documents) for each power of two between the shortest and the longest.
    """

    documents: int
    sequences: int
    tokens: int
    dtype: str
    size: int
    shortest: int
    median: int
    longest: int
    bins: tuple[tuple[int, int, int], ...]

    @property
    def mean(self) -> float:
        """Tokens a document."""
        return self.tokens / max(self.documents, 1)


def summarise(reader: IndexedReader, prefix: str | Path) -> Summary:
    """Summarise a dataset from its index; the tokens are not read."""
    lengths = document_lengths(reader)
    powers = np.frexp(lengths.astype(np.float64))[1]  # a length of 2^(p-1) to 2^p - 1 has the power p, and 0 has 0
    counts = np.bincount(powers) if lengths.size else np.array([], np.int64)
    known = np.flatnonzero(counts)
    span = range(known[0], known[-1] + 1) if known.size else range(0)
    bins = tuple((2**power // 2, max(2**power - 1, 0), int(counts[power])) for power in span)
    return Summary(
        len(reader.documents) - 1,
        len(reader),
        int(reader.lengths.sum(dtype=np.int64)),
        reader.dtype.name,
        tokens_path(prefix).stat().st_size + reader.path.stat().st_size,
        int(lengths.min(initial=lengths[0] if lengths.size else 0)),
        int(np.median(lengths)) if lengths.size else 0,
        int(lengths.max(initial=0)),
        bins,
    )


def document_lengths(reader: IndexedReader) -> NDArray[np.int64]:
    """Tokens of each document, [documents]."""
    starts = np.append(reader.offsets, len(reader.tokens) * reader.dtype.itemsize) // reader.dtype.itemsize
    lengths: NDArray[np.int64] = np.diff(starts[reader.documents])
    return lengths


def document(reader: IndexedReader, number: int) -> NDArray[np.generic]:
    """The tokens of a document, its sequences one after the other."""
    first, last = (int(place) for place in reader.documents[number : number + 2])
    return np.concatenate([reader[sequence] for sequence in range(first, last)]) if last > first else reader.tokens[:0]


def end_of(prefix: str | Path, tokenizer: Tokenizer) -> int | None:
    """The token after each document of the dataset: as ``PREFIX.json`` says, None for none, or else the tokenizer's."""
    end = read_about(prefix).get("end_of_document", tokenizer.end_of_document)
    return end if isinstance(end, int) else None


def text_of(tokens: NDArray[np.generic], tokenizer: Tokenizer, end: int | None) -> str:
    """The text from which ``data prepare`` makes these tokens: special ones by name, the ``end`` of a document not."""
    whole: list[int] = tokens.tolist()
    return tokenizer.decode(whole[:-1] if whole and whole[-1] == end else whole, special=True)


def samples(reader: IndexedReader, prefix: str | Path, tokenizer: Tokenizer, count: int) -> list[tuple[int, str, bool]]:
    """Return ``count`` documents spread over the dataset: number, text of the first ``SHOWN`` tokens, whether cut."""
    documents = len(reader.documents) - 1
    found, end = [], end_of(prefix, tokenizer)
    for number in sorted({round(place) for place in np.linspace(0, documents - 1, min(count, documents))}):
        tokens = document(reader, number)
        found.append((number, text_of(tokens[:SHOWN], tokenizer, end), len(tokens) > SHOWN))
    return found


def tokenizer_of(prefix: str | Path, name: str | None) -> Tokenizer | None:
    """Open the tokenizer ``name``, by default the one that ``<prefix>.json`` describes; None if nothing does.

    Raises :class:`DataError` where there is no dataset.
    """
    IndexedReader(prefix)
    if name:
        return open_tokenizer(name)
    made = made_with(Path(prefix))
    return made.tokenizer() if made else None


def plot(bins: Sequence[tuple[int, int, int]], width: int = 40) -> list[tuple[str, str, str]]:
    """Return a row for each bin: lengths, documents, and a bar of at most ``width``."""
    most = max((count for _, _, count in bins), default=0)
    return [
        (f"{first:,}-{last:,}", f"{count:,}", "#" * max(round(width * count / most), int(count > 0)))
        for first, last, count in bins
    ]
