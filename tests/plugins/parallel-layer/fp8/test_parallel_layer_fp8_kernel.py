"""The kernels that round to FP8: by Triton's interpreter they find a CPU's bits, and they compile as a CPU divides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from megatron_run_parallel_layer_fp8.cast import (
    BLOCK,
    TILE,
    WARPS,
    _cast_both_on_gpu,
    _cast_on_gpu,
    _scale,
    _scale_on_gpu,
)
from tests.support.compiled_kernels import compile_kernel
from tests.support.interpreted import interpreted

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


TYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Rows and columns of what is divided -> its types: one block or some, whole and not.
SIZES = {(1, 1): TYPES[:1], (64, 64): TYPES[:1], (65, 130): TYPES, (7, 200): TYPES[1:2], (200, 7): TYPES[2:]}
#: A type and a value that lies among the others, of which scales are found.
VALUES = [(torch.float32, 0.5), (torch.float16, 0.0), (torch.bfloat16, -70.0), (torch.bfloat16, 1e38)]
VALUES += [(torch.bfloat16, value) for value in (torch.inf, -torch.inf, torch.nan)]
SHAPES = {(1, 1): VALUES[:2], (3, 5000): VALUES[:2], (40, 130): VALUES}
#: By day some blocks of the type that trains, and one program and many that find scales, of numbers and of one that is
#: none.
FEW = {(65, 130): TYPES[1:2]}, {(3, 5000): VALUES[:1], (40, 130): VALUES[-1:]}


def quotients(sizes: Mapping[tuple[int, int], Sequence[torch.dtype]]) -> None:
    """The kernel on a CPU, writing fp32: Triton's interpreter rounds to FP8 as no GPU does (1.99 becomes 1)."""
    for (rows, columns), dtypes in sizes.items():
        for dtype in dtypes:
            for scale in (torch.tensor([[0.37]]), torch.rand(rows, 1) + 0.1):
                for matrix in (torch.randn(rows, columns), torch.randn(columns, rows).t()):
                    given = matrix.to(dtype)
                    expected = given.float() * (1 / scale)
                    found = _cast_on_gpu(given, scale, torch.float32)
                    assert found.is_contiguous()
                    assert torch.equal(found, expected), (rows, columns, dtype)
                    along, across = _cast_both_on_gpu(given, scale, torch.float32)
                    assert across.is_contiguous()
                    assert torch.equal(along, expected), (rows, columns, dtype)
                    assert torch.equal(across, expected.t()), (rows, columns, dtype)


def scales(shapes: Mapping[tuple[int, int], Sequence[tuple[torch.dtype, float]]]) -> None:
    """The bits of the scales that the kernels find, in one program and in many, in the ways a matrix may lie."""
    for (rows, columns), values in shapes.items():
        for dtype, value in values:
            given = (torch.randn(rows, columns) * torch.logspace(-6, 4, rows)[:, None]).to(dtype)
            given[rows // 2, columns // 2] = value
            for matrix in (given, given.t().contiguous().t()):
                for kind, each in ((E4M3, False), (E4M3, True), (E5M2, False)):
                    expected, found = _scale(matrix, kind, each), _scale_on_gpu(matrix, kind, each)
                    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
                    assert found.shape == ((rows, 1) if each else (1, 1))


def kernels(*, some: bool) -> None:
    sizes, shapes = FEW if some else (SIZES, SHAPES)
    quotients(sizes)
    scales(shapes)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.multiproc
@pytest.mark.timeout(240)
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_the_kernels_of_a_gpu_find_the_scales_of_a_cpu_and_divide_by_them_in_any_layout(some: bool) -> None:
    interpreted(partial(kernels, some=some))


@pytest.mark.te
@pytest.mark.parametrize("both", [0, 1])
@pytest.mark.parametrize(("kind", "instruction"), [("fp8e4nv", "e4m3x2"), ("fp8e5", "e5m2x2")])
def test_the_kernel_compiles_and_rounds_to_nearest(kind: str, instruction: str, both: int) -> None:
    pytest.importorskip("triton")  # which the kernel's module imports
    from megatron_run_parallel_layer_fp8.kernel import cast_tile

    arguments = f"*bf16 *fp32 *{kind} *{kind} i32! i32! i32! 1 0 {both} {TILE[0]} {TILE[1]}"
    found = compile_kernel(cast_tile, arguments, num_warps=WARPS)
    assert found.asm["cubin"]
    assert f"cvt.rn.satfinite.{instruction}.f32" in found.asm["ptx"]
    assert "div.rn.f32" in found.asm["ptx"], "a GPU would find other bits than a CPU"


@pytest.mark.te
def test_the_kernels_of_scales_compile_and_divide_as_a_cpu_does() -> None:
    pytest.importorskip("triton")
    from megatron_run_parallel_layer_fp8 import kernel

    assert compile_kernel(kernel.largest_of_parts, f"*bf16 *i32 i32! i32! {BLOCK}", num_warps=8).asm["cubin"]
    for compiled in (
        compile_kernel(kernel.scale_of_parts, "*i32 *fp32 i32 fp32 fp32 1024"),
        compile_kernel(kernel.scale_of_rows, "*bf16 *fp32 i32! i32! fp32 fp32 4096"),
    ):
        assert "div.rn.f32" in compiled.asm["ptx"]
