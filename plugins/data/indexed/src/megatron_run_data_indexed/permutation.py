"""A keyed permutation of 0..n-1 that is computed where it is asked for, without a table.

A Feistel network permutes the numbers of 2k bits: each round adds a keyed hash of one half to the other, which can be
undone, so no two numbers meet (Luby and Rackoff 1988). With 2k the fewest bits that hold n - 1, a number that lands at
n or above is permuted again until it lands below (cycle walking; Black and Rogaway 2002), after 4 walks at most on
average.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 8
#: Places permuted at once: a run reads in ascending order, and NumPy's cost per call is shared.
_BLOCK = 1024


class Permutation:
    """A permutation of 0..n-1, a pure function of ``key``. It keeps the last block of results."""

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
