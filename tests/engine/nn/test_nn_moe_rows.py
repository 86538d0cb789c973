"""Rows of experts added up: as exactly as their type can show, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_run_engine.nn.moe.placement import sum_rows


def rows(dtype: torch.dtype, tokens: int = 6, terms: int = 16, hidden: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and origins: ``terms`` of each token, in no order of the tokens."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(tokens * terms, hidden, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(tokens * terms, generator=generator).to(dtype).float().requires_grad_()
    return made, weights, torch.randperm(tokens * terms, generator=generator) % tokens


def exact(made: Tensor, weights: Tensor, origin: Tensor, tokens: int = 6) -> Tensor:
    terms = made.double() * weights.double()[:, None]
    return torch.stack([terms[origin == token].sum(0) for token in range(tokens)])


def within_one_rounding(sums: Tensor, made: Tensor, weights: Tensor, origin: Tensor, added: torch.dtype) -> bool:
    """Half a unit in the last place, and what 16 additions in the type ``added`` may have left."""
    expected, largest = exact(made, weights, origin), exact(made.abs(), weights, origin)
    bound = torch.finfo(sums.dtype).eps / 2 * expected.abs() + 16 * torch.finfo(added).eps * largest
    return bool(((sums.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize(
    ("dtype", "added"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_a_sum_of_rows_is_rounded_once(dtype: torch.dtype, added: torch.dtype) -> None:
    made, weights, origin = rows(dtype)
    sums = sum_rows(made, weights, origin, 6)
    assert sums.dtype == dtype
    assert within_one_rounding(sums, made, weights, origin, added)


def test_added_in_sixteen_bits_it_would_be_rounded_more_than_once() -> None:
    """What the bound above is there to find."""
    made, weights, origin = rows(torch.bfloat16)
    plain = made.new_zeros(6, 32).index_add(0, origin, made * weights.to(made.dtype)[:, None])
    assert not within_one_rounding(plain, made, weights, origin, torch.float32)


def test_gradients_of_rows_and_weights_are_those_of_the_sum() -> None:
    made, weights, origin = rows(torch.float64)
    seed = torch.randn(6, 32, dtype=torch.float64)
    found = torch.autograd.grad(sum_rows(made, weights, origin, 6), (made, weights), seed)
    expected = torch.autograd.grad(exact(made, weights, origin), (made, weights), seed)
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine.double(), other.double(), rtol=1e-6)
