"""Near duplicates: documents whose sets of shingles have a Jaccard index of at least a threshold.

Locality-sensitive hashing of MinHash signatures finds the pairs that are worth comparing (Broder 1997; Leskovec et al.,
Mining of Massive Datasets, section 3.4). They are compared exactly.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from megatron_run_engine.data import ngrams

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Words of a shingle.
SHINGLE = 5
#: Hashes of a signature, and the bands they are cut into. Signatures of similarity s share a band with the probability
#: 1 - (1 - s^(HASHES / BANDS))^BANDS: 0.9998 at 0.7, 0.87 at 0.5.
HASHES, BANDS = 128, 32


def shingles(texts: Sequence[str], size: int = SHINGLE) -> list[NDArray[np.uint64]]:
    """The hashes of each text's distinct shingles, sorted. A text of fewer words is one shingle."""
    from rensa import RMinHash

    sets = [list(ngrams(text, size)) or list(_whole(text, size)) for text in texts]
    return [np.unique(np.array(hashes, np.uint64)) for hashes in RMinHash.hash_token_sets(sets)]


def _whole(text: str, size: int) -> Iterator[str]:
    """The longest n-gram of a text of fewer than ``size`` words, which is all of it, if it has any."""
    return islice(chain.from_iterable(ngrams(text, fewer) for fewer in range(size - 1, 0, -1)), 1)


def jaccard(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> float:
    """The share of common elements in the union of two sorted sets, from 0 to 1; 0 for two empty ones."""
    common = len(np.intersect1d(one, other, assume_unique=True))
    union = len(one) + len(other) - common
    return common / union if union else 0.0


class Duplicates:
    """Finds the earlier document that a new one is nearly equal to.

    Memory holds a signature of half a kilobyte, its bands and the name of each document that stayed. The shingles, by
    which candidates are compared exactly, lie in a temporary file of eight bytes a word.
    """

    def __init__(self, similarity: float) -> None:
        import rensa

        self._similarity, self._minhash = similarity, rensa.RMinHash
        self._index = rensa.RMinHashLSH(similarity, HASHES, BANDS)
        self._names: list[str] = []
        self._ends = array("Q", [0])
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as this object; it has no name to stay

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, documents: Sequence[tuple[str, NDArray[np.uint64]]]) -> list[tuple[str, float] | None]:
        """Return for each (name, shingles) the first document it is like, with their similarity, or None: it stays."""
        tokens = [hashes.view("V8").tolist() for _, hashes in documents]  # rensa takes the eight bytes of each
        signatures = self._minhash.from_token_sets(tokens, HASHES, 1)
        return [self._add(*document, signature) for document, signature in zip(documents, signatures, strict=True)]

    def _add(self, name: str, hashes: NDArray[np.uint64], signature: Any) -> tuple[str, float] | None:
        if not len(hashes):
            return None
        for candidate in sorted(self._index.query(signature)):
            similarity = jaccard(hashes, self._shingles(candidate))
            if similarity >= self._similarity:
                return self._names[candidate], similarity
        self._index.insert(len(self._names), signature)
        self._names.append(name)
        self._ends.append(self._ends[-1] + self._file.write(hashes.tobytes()))
        return None

    def _shingles(self, candidate: int) -> NDArray[np.uint64]:
        start, end = self._ends[candidate], self._ends[candidate + 1]
        self._file.flush()
        return np.frombuffer(os.pread(self._file.fileno(), end - start, start), np.uint64)
