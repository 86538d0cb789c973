from __future__ import annotations

import math

import pytest
import torch

from megatron_run_engine.optim.gradients import sum_of_squares


@pytest.mark.parametrize("length", [0, 1, 255, 256, 300, 100_000])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1.0, 1e14, 1e30])
def test_it_is_the_sum_in_float64_whatever_fp32_can_hold(length: int, size: float) -> None:
    """Squares of 1e30 overflow fp32, those of 1e-30 are zero there."""
    flat = torch.randn(length, generator=torch.Generator().manual_seed(0)) * size
    found = sum_of_squares(flat)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(math.fsum(value * value for value in flat.tolist()), rel=1e-6, abs=0.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_shows(value: float) -> None:
    flat = torch.ones(1000)
    flat[700] = value
    assert not sum_of_squares(flat).isfinite()


def test_one_large_value_among_many_small_ones_is_not_lost() -> None:
    flat = torch.full((1000,), 1e-22)
    flat[3] = 1e25
    assert sum_of_squares(flat).item() == pytest.approx(float(flat[3]) ** 2, rel=1e-6, abs=0.0)
    flat[3] = 1e-22
    assert sum_of_squares(flat).item() == pytest.approx(1000 * float(flat[3]) ** 2, rel=1e-6, abs=0.0)
