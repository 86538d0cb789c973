"""Weight gradients of products by groups: in Triton's interpreter against float64, and as code for Hopper."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tests.support.compiled_kernels import compile_kernel
from tests.support.interpreted import interpreted

KERNELS = "megatron_run_engine.nn.fused.group_kernels"
#: Less than a block of rows, more than one, one row alone, and none.
COUNTS = ([3, 0, 70, 130], [0, 0, 0, 203], [1, 0, 0, 0], [0, 0, 0, 0])
#: Types of operands and totals. The interpreter takes 16 bits of bf16 for whole numbers when it multiplies.
TYPES = ((torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float16, torch.float16))


def added() -> list[tuple[list[int], Tensor, Tensor]]:
    """Of each case: counts, the kernel's totals, and those in float64."""
    kernels, found = import_module(KERNELS), []
    for operands, totals in TYPES:
        for counts in COUNTS:
            left, right = (torch.randn(sum(counts), features).to(operands) for features in (136, 72))
            sums = torch.randn(len(counts), 136, 72).to(totals)
            parts = zip(left.double().split(counts), right.double().split(counts), strict=True)
            exact = sums.double() + torch.stack([one.T @ other for one, other in parts])
            ends = torch.tensor([*accumulate(counts)], dtype=torch.int32)
            kernels.add_grouped_products(sums, left, right, ends)
            found.append((counts, sums, exact))
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_products_of_each_group_are_added_in_fp32() -> None:
    """Tiles that features do not fill, groups without rows; 16-bit totals are rounded once."""
    found = interpreted(added)
    assert len(found) == len(COUNTS) * len(TYPES)
    for counts, sums, exact in found:
        bound = {torch.float32: 1e-5, torch.float16: 1e-3}[sums.dtype]
        torch.testing.assert_close(sums.double(), exact, rtol=bound, atol=4 * bound, msg=f"{counts}, {sums.dtype}")


@pytest.mark.te
@pytest.mark.parametrize("totals", ["fp32", "bf16"])
def test_it_compiles_to_products_of_the_matrix_units(totals: str) -> None:
    pytest.importorskip("triton")  # which the kernel's module imports
    kernels = import_module(KERNELS)
    arguments = f"*{totals} *bf16 *bf16 *i32 i32! i32! {kernels.TILE_A} {kernels.TILE_C} {kernels.ROWS}"
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    compiled = compile_kernel(kernels.add_products, arguments, **options)
    assert "wgmma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024
