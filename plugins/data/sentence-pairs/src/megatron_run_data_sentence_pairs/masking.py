"""Whole-word n-gram masking (Joshi et al. 2019, "SpanBERT"; Devlin et al. 2018), and the numbers that it draws.

Words are chosen in runs of up to three, whole: all tokens of a word or none. A run is hidden as one: 80% of the runs
become mask tokens, 10% random ones, and 10% stay as they are. The shorter the run, the likelier: 1/n for n words, as
in Lan et al. 2019, equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Of the chosen runs, the share that becomes mask tokens, and up to which share the others become random tokens.
_MASKED, _REPLACED = 0.8, 0.9


class Draws:
    """The random numbers of one sample, a pure function of ``key`` under every version of NumPy.

    They come from the raw stream of PCG64, which NumPy guarantees for ever, unlike that of its Generator.
    """

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


@dataclass(frozen=True)
class Masking:
    """``share`` of the tokens are guessed, in runs of up to ``longest`` words; random tokens are below ``stop``.

    ``begins`` [vocabulary] is true for the tokens that begin a word, and ``mask`` the id that hides one.
    """

    begins: NDArray[np.bool_]
    mask: int
    stop: int
    share: float = 0.15
    longest: int = 3

    def apply(
        self, tokens: NDArray[np.int64], texts: Sequence[tuple[int, int]], draws: Draws
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Hide tokens of ``texts``, the ranges of ``tokens`` [n] that may be: the new tokens, and which are guessed.

        About ``share`` of the tokens in ``texts`` are chosen, and one at least; no run crosses into another text.
        """
        words = [span for first, stop in texts for span in self._words(tokens, first, stop)]
        hidden, chosen = tokens.copy(), np.zeros(len(tokens), np.bool_)
        left = max(1, round(self.share * sum(stop - first for first, stop in texts)))
        chances = np.cumsum(1.0 / np.arange(1, self.longest + 1))
        for start in draws.order(len(words)).tolist():
            if left <= 0:
                break
            length = 1 + int(np.searchsorted(chances, draws.uniform() * chances[-1], side="right"))
            run = self._run(words, start, length, left, chosen)
            if run is None:
                continue
            first, stop = run
            chosen[first:stop] = True
            left -= stop - first
            kind = draws.uniform()
            if kind < _MASKED:
                hidden[first:stop] = self.mask
            elif kind < _REPLACED:
                hidden[first:stop] = [draws.below(self.stop) for _ in range(stop - first)]
        if not chosen.any() and words:  # every word is longer than the share allows
            first, stop, _ = words[draws.below(len(words))]
            chosen[first:stop], hidden[first:stop] = True, self.mask
        return hidden, chosen

    def _words(self, tokens: NDArray[np.int64], first: int, stop: int) -> list[tuple[int, int, int]]:
        """The words of one text: first token, the one after the last, and the text, by its first token."""
        if stop <= first:
            return []
        begins = self.begins[tokens[first:stop]]
        starts = np.flatnonzero(begins | (np.arange(stop - first) == 0)) + first
        return [(a, b, first) for a, b in zip(starts.tolist(), [*starts[1:].tolist(), stop], strict=True)]

    def _run(
        self, words: Sequence[tuple[int, int, int]], start: int, length: int, left: int, chosen: NDArray[np.bool_]
    ) -> tuple[int, int] | None:
        """The tokens of the run from word ``start``, of ``length`` words or as many as fit ``left``; None for none."""
        first, _, text = words[start]
        stop = first
        for begin, end, of in words[start : start + length]:
            if of != text or end - first > left or chosen[begin:end].any():
                break
            stop = end
        return (first, stop) if stop > first else None
