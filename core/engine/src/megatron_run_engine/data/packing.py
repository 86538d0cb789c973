"""Packs documents end to end into one token stream, and cuts it into samples of fixed length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_engine.data.tokenizer import Tokenizer


def pack(documents: Iterable[tuple[object, bytes]], tokenizer: Tokenizer) -> NDArray[Any]:
    """Return the token ids of the documents ``(source, content)``, [n], with an end-of-document token after each.

    The ids have the smallest unsigned type that holds the vocabulary. Raises :class:`DataError` naming the source and
    offset of an id outside the vocabulary.
    """
    end = np.array([tokenizer.end_of_document])
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    parts = [np.empty(0, dtype)]
    for source, content in documents:
        tokens = tokenizer.encode(content, source)
        require_within(tokens, tokenizer.vocab_size, source)
        parts.append(np.concatenate([tokens, end]).astype(dtype))
    return np.concatenate(parts)


def require_within(tokens: NDArray[np.int64], vocab_size: int, source: object) -> None:
    """Raise :class:`DataError` naming ``source`` and offset of the first id outside ``0..vocab_size-1``."""
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if outside.size:
        offset = int(outside[0])
        raise DataError(
            f"{source} holds token id {tokens[offset]} at token {offset}",
            why=f"the vocabulary has {vocab_size} ids",
            fix="use the tokenizer that the model was made for",
        )


class PackedDataset:
    """Samples of ``sequence_length`` from a stream: sample i reads the s + 1 tokens from i * s on.

    Neighbouring samples share one token, the last label of one and the first token of the next. So every token but the
    very first is a label once. The rest of the stream that fills no sample is dropped.
    """

    def __init__(self, stream: NDArray[Any], sequence_length: int) -> None:
        self._stream, self._length = stream, sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._stream) - 1) // self._length)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        """``tokens`` and ``labels`` int64 [s], ``loss_mask`` fp32 [s]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self._length
        window = self._stream[start : start + self._length + 1].astype(np.int64)
        return {"tokens": window[:-1], "labels": window[1:], "loss_mask": np.ones(self._length, np.float32)}

    def pairs(self, samples: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens, labels) of ``samples``, in their order, each [len(samples) * s]."""
        starts = np.asarray(samples, dtype=np.int64)[:, None] * self._length  # [n, 1]
        places = (starts + np.arange(self._length)).ravel()  # [n * s]
        return self._stream[places].astype(np.int64), self._stream[places + 1].astype(np.int64)
