"""Random numbers of one sample: a pure function of its key, under every version of NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Draws:
    """Draws from the raw stream of PCG64, which NumPy guarantees for ever, unlike that of its Generator."""

    def __init__(self, *key: int) -> None:
        self._raw = np.random.PCG64(list(key))

    def uniform(self) -> float:
        """A number in [0, 1), of 53 bits."""
        return int(self._raw.random_raw() >> 11) * 2.0**-53

    def below(self, n: int) -> int:
        """One of 0..n-1."""
        return int(self.uniform() * n)

    def order(self, n: int) -> NDArray[np.int64]:
        """The numbers 0..n-1, shuffled."""
        return np.argsort(self._raw.random_raw(n), kind="stable")
