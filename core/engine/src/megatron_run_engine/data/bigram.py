"""A bigram model: the baseline that a trained language model must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Added to the count of every pair, so that an unseen pair has a probability above zero.
SMOOTHING = 0.1


class Bigram:
    """P(label | token) = (count(token, label) + a) / (count(token) + a * V), additive smoothing with a = SMOOTHING.

    Only pairs that occur are stored, so that a vocabulary V of any size fits. ``tokens`` and ``labels`` are [n].
    """

    def __init__(self, tokens: NDArray[np.int64], labels: NDArray[np.int64], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pairs, self._pair_counts = np.unique(tokens * vocab_size + labels, return_counts=True)
        self._token_counts = np.bincount(tokens, minlength=vocab_size)

    def loss(self, tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
        """Return the mean of -log P(label | token) over [n] tokens and labels, in nats per token."""
        pairs, times = np.unique(tokens * self._vocab_size + labels, return_counts=True)
        places = np.searchsorted(self._pairs, pairs).clip(max=len(self._pairs) - 1)
        counts = np.where(self._pairs[places] == pairs, self._pair_counts[places], 0)
        totals = self._token_counts[pairs // self._vocab_size]
        probabilities = (counts + SMOOTHING) / (totals + SMOOTHING * self._vocab_size)
        return float(-(times * np.log(probabilities)).sum() / times.sum())
