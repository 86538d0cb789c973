"""Which dataset each sample of a blend comes from: megatron-core's choice, in blocks that advance side by side.

Sample s comes from the dataset that is furthest behind its share: argmax over i of w_i max(s, 1) - c_i, where c_i
counts the samples taken from it so far, and the first of equals wins. So each choice needs all choices before it. But
the rule forgets: two histories soon agree, since a dataset with a sample too many is passed over until it fits again.
Therefore the samples are cut into blocks, each of which starts from the likely counts, and one NumPy operation makes a
choice in every block. A block that began with other counts than the one before ended with is made again from those,
until every block joins. Then all are exact, by induction from the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Counts = NDArray[np.float64]  # [n, k]: of n datasets, in k blocks; whole numbers


def normalised(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return ``weights`` divided by their sum, rounded as megatron-core rounds them."""
    values = np.asarray(weights, np.float64)
    shares: NDArray[np.float64] = values / values.sum()
    return shares


def blend(weights: Sequence[float], size: int) -> NDArray[np.int16]:
    """Return the dataset of each of ``size`` samples, [size], as ``BlendedDataset`` chooses it."""
    shares = normalised(weights)
    length = max(1, min(4096, int(size**0.5)))  # of a block: as many choices one by one, each in size / length blocks
    firsts = np.arange(0, size, length, dtype=np.int64)
    choices = np.zeros((len(firsts), length), np.int16)
    starts = _likely(shares, firsts)
    ends = np.empty_like(starts)
    wrong = np.arange(len(firsts))
    while wrong.size:
        ends[:, wrong], choices[wrong] = _advance(shares, firsts[wrong], starts[:, wrong], length)
        wrong = 1 + np.flatnonzero((ends[:, :-1] != starts[:, 1:]).any(axis=0))
        starts[:, wrong] = ends[:, wrong - 1]
    return choices.ravel()[:size]


def places_in(datasets: NDArray[np.int16], number: int) -> NDArray[np.int64]:
    """Return the index of each sample in its dataset, [size]: the samples of each are taken in their order."""
    places = np.empty(len(datasets), np.int64)
    for dataset in range(number):
        samples = np.flatnonzero(datasets == dataset)
        places[samples] = np.arange(len(samples))
    return places


def _likely(shares: NDArray[np.float64], firsts: NDArray[np.int64]) -> Counts:
    """Return counts near the shares of ``firsts`` samples that sum to them: the largest remainders are rounded up."""
    exact = shares[:, None] * firsts
    counts = np.floor(exact)
    missing = firsts - counts.sum(axis=0)
    ranks = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0, kind="stable")
    likely: Counts = counts + (ranks < missing)
    return likely


def _advance(
    shares: NDArray[np.float64], firsts: NDArray[np.int64], counts: Counts, length: int
) -> tuple[Counts, NDArray[np.int16]]:
    """Choose ``length`` samples in each block; return the counts after them [n, k] and the choices [k, length]."""
    counts, blocks, column = counts.copy(), np.arange(len(firsts)), shares[:, None]
    choices = np.empty((length, len(firsts)), np.int16)
    for step in range(length):
        chosen = (column * np.maximum(firsts + step, 1) - counts).argmax(axis=0)
        counts[chosen, blocks] += 1
        choices[step] = chosen
    return counts, choices.T
