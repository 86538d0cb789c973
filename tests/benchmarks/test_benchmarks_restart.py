"""The simulation of restarts, beside the closed formula."""

from __future__ import annotations

import random
from math import exp, expm1
from unittest import mock

import pytest

from benchmarks.restart import simulation
from megatron_run_engine.checkpoint.manifest import decode_manifest


@pytest.mark.parametrize("down", [0.0, 60.0, 3600.0])
def test_the_share_is_that_of_failures_that_come_at_random(down: float) -> None:
    """Of work W, exponential, the whole copies but the last one stay: c e^(-c/T) / (e^(c/T) - 1) of each T."""
    between, copy = simulation.BETWEEN, simulation.EVERY * simulation.STEP
    expected = exp(-down / between) * copy * exp(-copy / between) / expm1(copy / between) / between
    with mock.patch.object(simulation, "DAYS", 20_000):
        assert simulation.share(down, random.Random(3)) == pytest.approx(expected, rel=0.02)


def test_what_ranks_read_of_a_step_grows_with_them() -> None:
    small, large = (simulation.manifest_of(ranks) for ranks in (4, 64))
    assert (len(small.files), len(large.files)) == (4, 64)
    assert decode_manifest(large.encode(), "manifest") == large
    costs = [simulation.communicators_on(ranks) for ranks in (1024, 2048, 10_000, 16_384)]
    assert [round(each, 1) for each in costs] == [2.5, 5.0, 30.0, 50.1]
