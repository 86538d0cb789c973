"""Samples: a text with some runs of tokens taken out for the encoder, and what was taken out for the decoder.

    text     t0 t1 t2 t3 t4 t5 t6 t7
    encoder  t0 t1 <0> t4 t5 t6 <1> </s>
    decoder     <0> t2 t3 <1> t7 </s>

The lengths of runs, and of what is between them, are drawn uniformly among all that have the given sums (Raffel et al.
2020, "T5", section 3.1.4, as its code does). So a text's length alone says how long both sides are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run_engine.data import DrawnSamples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_engine.data import Tokenizer

#: A split's rest of fewer tokens is left out.
LEAST = 8


@dataclass(frozen=True)
class Corruption:
    """``share`` of a text's tokens is taken out, in runs of ``span`` tokens in the mean."""

    share: float
    span: float

    def counts(self, length: int) -> tuple[int, int]:
        """How many of ``length`` tokens are taken out, and in how many runs; something stays before each run."""
        taken = min(max(round(length * self.share), 1), length - 1)
        runs = max(round(taken / self.span), 1)
        return taken, min(runs, taken, length - taken)

    def sizes(self, length: int) -> tuple[int, int]:
        """The tokens that encoder and decoder get of a text of ``length`` tokens, the end of each included."""
        taken, runs = self.counts(length)
        return length - taken + runs + 1, taken + runs + 1

    def longest(self, room: int) -> int:
        """The tokens of the longest text of which the encoder gets at most ``room``."""
        length = 2
        while self.sizes(length + 1)[0] <= room:
            length += 1
        return length

    def runs(self, length: int, key: Sequence[int]) -> NDArray[np.int64]:
        """Where runs begin and end in a text: bounds [1 + 2 runs] from 0 on, kept and taken parts in turn.

        A pure function of ``key`` under every version of NumPy, which guarantees the raw stream for ever.
        """
        taken, runs = self.counts(length)
        raw = np.random.PCG64(list(key))
        parts = np.empty(2 * runs, np.int64)
        parts[0::2], parts[1::2] = _cut(length - taken, runs, raw), _cut(taken, runs, raw)
        return np.concatenate(([0], np.cumsum(parts)))


def _cut(total: int, parts: int, raw: np.random.PCG64) -> NDArray[np.int64]:
    """Cut ``total`` into so many ``parts`` of at least 1, each way as likely as any other."""
    cuts = np.argsort(raw.random_raw(total - 1), kind="stable")[: parts - 1] if total > 1 else np.empty(0, np.int64)
    return np.diff(np.concatenate(([0], np.sort(cuts) + 1, [total])))


@dataclass(frozen=True)
class SpanVocabulary:
    """Ids of padding, of the end of a text, and of what stands for the runs; ``size`` of the vocabulary with them."""

    padding: int
    end: int
    sentinels: NDArray[np.int64]
    size: int


def span_vocabulary(tokenizer: Tokenizer, runs: int) -> SpanVocabulary:
    """Those of ``tokenizer`` by T5's names, with sentinels for ``runs``; what it lacks gets ids after its last."""
    known = tokenizer.vocabulary
    names = ["<pad>", "</s>", *(f"<extra_id_{run}>" for run in range(runs))]
    lacking = [name for name in names if name not in known]
    ids = {**known, **{name: tokenizer.vocab_size + place for place, name in enumerate(lacking)}}
    padding, end, *sentinels = (ids[name] for name in names)
    return SpanVocabulary(padding, end, np.array(sentinels, np.int64), tokenizer.vocab_size + len(lacking))


class Spans(DrawnSamples):
    """One sample for each ``length`` tokens of each of ``texts``; its runs follow from ``key``, epoch and index.

    A sample has ``sizes`` tokens for encoder and decoder, of which the last may be padding.
    """

    def __init__(
        self,
        texts: Sequence[NDArray[Any]],
        vocabulary: SpanVocabulary,
        corruption: Corruption,
        length: int,
        sizes: tuple[int, int],
        key: tuple[int, ...],
    ) -> None:
        self._texts, self._vocabulary, self._corruption = texts, vocabulary, corruption
        self._length, self._sizes, self._key = length, sizes, key
        self._ends = np.cumsum([len(text) // length + (len(text) % length >= LEAST) for text in texts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sample(self, index: int, epoch: int) -> dict[str, NDArray[Any]]:
        """Sample ``index`` as it is in ``epoch``. Raises IndexError beyond the last."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[part - 1]) if part else 0)) * self._length
        text = self._texts[part][start : start + self._length].astype(np.int64)
        bounds = self._corruption.runs(len(text), (*self._key, epoch, index))
        parts, marks = np.split(text, bounds[1:-1]), self._vocabulary.sentinels[:, None]
        read = self._joined(each for run, kept in enumerate(parts[0::2]) for each in (kept, marks[run]))
        target = self._joined(each for run, taken in enumerate(parts[1::2]) for each in (marks[run], taken))
        return self._laid_out(read, target)

    def _joined(self, parts: Any) -> NDArray[np.int64]:
        return np.concatenate([*parts, [self._vocabulary.end]])

    def _laid_out(self, read: NDArray[np.int64], target: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        encoder, decoder = (np.full(size, self._vocabulary.padding, np.int64) for size in self._sizes)
        encoder[: len(read)], decoder[: len(target)] = read, target
        given = np.roll(decoder, 1)
        given[0] = self._vocabulary.padding  # with which T5's decoder begins
        return {
            "tokens": given,
            "labels": decoder,
            "loss_mask": (np.arange(len(decoder)) < len(target)).astype(np.float32),
            "encoder_tokens": encoder,
            "encoder_mask": (np.arange(len(encoder)) < len(read)).astype(np.int64),
        }
