"""MKL's product of bf16 matrices with an fp32 result against float64."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_run_engine.nn.linear import _gemm, add_wide_product, can_add

pytestmark = pytest.mark.skipif(_gemm() is None, reason="a CPU without AMX")

#: Rows, columns and terms: single ones, whose strides say nothing; none; and sizes that fit no block.
SHAPES = ((8, 5, 3), (1, 1, 1), (1, 7, 4), (7, 1, 4), (4, 4, 1), (3, 3, 0), (65, 97, 130))


def laid(rows: int, columns: int, how: str) -> Tensor:
    if how == "rows":
        return torch.randn(rows, columns).bfloat16()
    if how == "columns":
        return torch.randn(columns, rows).bfloat16().t()
    if how == "repeated":
        return torch.randn(1, columns).bfloat16().expand(rows, columns)
    return torch.randn(2 * rows, 3 * columns).bfloat16()[::2, ::3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_added_however_the_matrices_lie(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for left, right in product(("rows", "columns", "repeated", "apart"), repeat=2):
        one, other = laid(m, k, left), laid(k, n, right)
        around = torch.randn(m, n + 2)
        total = around[:, :n]
        expected, beside = total.double() + one.double() @ other.double(), around[:, n:].clone()
        assert can_add(total, one, other), (left, right)
        add_wide_product(total, one, other)
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(around[:, n:], beside), (left, right)


def test_other_types_and_places_are_left_to_others() -> None:
    total, left, right = torch.zeros(4, 6), torch.zeros(4, 2).bfloat16(), torch.zeros(2, 6).bfloat16()
    assert not can_add(total, left.half(), right.half())
    assert not can_add(total.bfloat16(), left, right)
    assert not can_add(torch.zeros(6, 4).t(), left, right)
    assert not can_add(*(each.to("meta") for each in (total, left, right)))


def test_without_the_processors_matrices_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert _gemm.__wrapped__() is None
