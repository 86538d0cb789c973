"""Blends equal megatron-core's, and the rule said plainly."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_run_data_indexed.blend import blend, normalised, places_in
from tests.plugins.data.indexed.corpora import megatron


def greedy(weights: NDArray[np.float64], size: int) -> list[int]:
    """The rule, one sample after the other."""
    shares, counts, choices = weights / weights.sum(), np.zeros(len(weights)), []
    for sample in range(size):
        chosen = int(np.argmax(shares * max(sample, 1) - counts))
        counts[chosen] += 1
        choices.append(chosen)
    return choices


def drawn(seed: int) -> tuple[NDArray[np.float64], int]:
    """Weights of 1 to 12 datasets, of four kinds: any, with many ties, very unequal, equal."""
    generator = np.random.default_rng(seed)
    n = int(generator.integers(1, 13))
    weights = (
        generator.random(n),
        generator.integers(1, 5, n).astype(np.float64),
        generator.random(n) ** 6 + 1e-5,
        np.ones(n),
    )[seed % 4]
    return weights, int(generator.integers(1, 30_000))


@pytest.mark.parametrize("seed", range(30))
def test_a_blend_equals_megatron_cores(seed: int) -> None:
    oracle = megatron()
    weights, size = drawn(seed)
    choices, places = np.zeros(size, np.int16), np.zeros(size, np.int64)
    shares = oracle.normalize(weights.tolist())
    oracle.helpers.build_blending_indices(choices, places, shares, len(weights), size, False)
    found = blend(weights.tolist(), size)
    np.testing.assert_array_equal(found, choices)
    np.testing.assert_array_equal(places_in(found, len(weights)), places)
    assert normalised(weights.tolist()).tolist() == shares


@pytest.mark.parametrize("seed", range(8))
def test_a_blend_follows_the_rule(seed: int) -> None:
    weights, size = drawn(seed)
    size = min(size, 5000)
    assert blend(weights.tolist(), size).tolist() == greedy(weights, size)


def test_a_dataset_that_is_hardly_chosen_is_chosen_where_the_rule_says() -> None:
    weights = np.array([1.0, 1.0, 2e-4])  # a block of choices is shorter than the wait for the third
    found = blend(weights.tolist(), 20_000)
    assert found.tolist() == greedy(weights, 20_000)
    assert (found == 2).sum() == 2
