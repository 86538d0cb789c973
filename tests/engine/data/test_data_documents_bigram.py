"""The bigram baseline against a loop over pairs, and against its limits."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megatron_run_engine.data.documents import SMOOTHING, Bigram


def by_hand(train: list[int], validation: list[int], size: int) -> float:
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    total = 0.0
    for token, label in pairwise(validation):
        total -= math.log((pairs[token, label] + SMOOTHING) / (firsts[token] + SMOOTHING * size))
    return total / (len(validation) - 1)


@pytest.mark.parametrize("size", [3, 20, 60_000])
def test_the_loss_equals_a_loop_over_pairs(size: int) -> None:
    generator = np.random.default_rng(size)
    train, validation = generator.integers(min(size, 50), size=400), generator.integers(min(size, 70), size=150)
    model = Bigram(train[:-1], train[1:], size)
    found = model.loss(validation[:-1], validation[1:])
    assert found == pytest.approx(by_hand(train.tolist(), validation.tolist(), size), rel=1e-12)


def test_probabilities_of_a_token_add_up_to_one() -> None:
    train = np.array([0, 1, 1, 2, 0, 1])
    model = Bigram(train[:-1], train[1:], 4)
    for token in range(4):
        losses = [model.loss(np.array([token]), np.array([label])) for label in range(4)]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)


def test_a_cycle_is_learned_almost_perfectly() -> None:
    train = np.arange(10_000) % 5
    assert Bigram(train[:-1], train[1:], 5).loss(train[:-1], train[1:]) < 1e-3
