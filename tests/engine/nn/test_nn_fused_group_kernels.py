"""Weight gradients of products by groups: in Triton's interpreter against float64, and as code for Hopper."""

from __future__ import annotations

import builtins
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.interpreted import interpreted

KERNELS = "megatron_run_engine.nn.fused.group_kernels"
#: Less than a block of rows, more than one, one row alone, and none.
COUNTS = ([3, 0, 70, 130], [0, 0, 0, 203], [1, 0, 0, 0], [0, 0, 0, 0])
#: Types of operands and totals. The interpreter takes 16 bits of bf16 for whole numbers when it multiplies.
TYPES = ((torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float16, torch.float16))


class _Number(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.int)


class Number(metaclass=_Number):
    """``int`` that also takes an array of one number: the interpreter's loops have such, and numpy 2.5 refuses them."""

    def __new__(cls, value: Any) -> Any:
        return builtins.int(value.item() if hasattr(value, "item") else value)


def added() -> list[tuple[list[int], Tensor, Tensor]]:
    """Of each case: counts, the kernel's totals, and those in float64."""
    import_module("triton.runtime.interpreter").int = Number  # type: ignore[attr-defined]  # it finds its own
    kernels, found = import_module(KERNELS), []
    for operands, totals in TYPES:
        for counts in COUNTS:
            left, right = (torch.randn(sum(counts), features).to(operands) for features in (136, 72))
            mine = torch.randn(len(counts), 136, 72).to(totals)
            parts = zip(left.double().split(counts), right.double().split(counts), strict=True)
            exact = mine.double() + torch.stack([one.T @ other for one, other in parts])
            ends = torch.tensor([*accumulate(counts)], dtype=torch.int32)
            kernels.add_grouped_products(mine, left, right, ends)
            found.append((counts, mine, exact))
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_products_of_each_group_are_added_in_fp32() -> None:
    """Tiles that features do not fill, groups without rows; 16-bit totals are rounded once."""
    found = interpreted(added)
    assert len(found) == len(COUNTS) * len(TYPES)
    for counts, mine, exact in found:
        bound = {torch.float32: 1e-5, torch.float16: 1e-3}[mine.dtype]
        torch.testing.assert_close(mine.double(), exact, rtol=bound, atol=4 * bound, msg=f"{counts}, {mine.dtype}")


@pytest.mark.te
@pytest.mark.parametrize("totals", ["fp32", "bf16"])
def test_it_compiles_to_products_of_the_matrix_units(
    totals: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = import_module(KERNELS)
    types = dict(zip(kernels.add_products.arg_names, f"*{totals} *bf16 *bf16 *i32 i32 i32".split(), strict=False))
    constants = {"tile": kernels.TILE, "rows": kernels.ROWS}
    even = {(index,): [["tt.divisibility", 16]] for index in range(len(types))}
    source = ASTSource(kernels.add_products, types | dict.fromkeys(constants, "constexpr"), constants, even)
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024
