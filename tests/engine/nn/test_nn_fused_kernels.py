"""The kernels compile for a GPU of NVIDIA's Hopper generation, as Triton would on one; no GPU is needed for that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from megatron_run_engine.nn.fused import WIDEST_NORM, norm_rows
from tests.support.compiled_kernels import compile_kernel

TYPES = ("bf16", "fp16", "fp32")
#: By kernel: its arguments, as :func:`compile_kernel` takes them, and its warps.
KERNELS = {
    "loss_kernels.row_statistics": ("*{0} *i64 *fp32 i64! i32 i32! i32 0 4096", 8),
    "loss_kernels.row_statistics smoothed": ("*{0} *i64 *fp32 i64! i32 i32! i32 1 4096", 8),
    "loss_kernels.row_gradient": ("*{0} *{0} *i64 *i1 *fp32 *fp32 *fp32 i64! i64! i32! i32 fp32 fp32 4096", 8),
    "sum_kernels.partial_sums": ("*{0} *fp32 i64! i32 i32! i32 32 128 4", 4),
    "sum_kernels.add_sums": ("*fp32 *fp32 i64! i32 i32! 256 16", 8),
    "gelu_kernels.gelu": ("*{0} *{0} i32! 0 2048", 4),
    "gelu_kernels.gelu by tanh": ("*{0} *{0} i32! 1 2048", 4),
    "gelu_kernels.gelu_gradient": ("*{0} *{0} *{0} *fp32 i32 i32! i32 0 16 128 1", 4),
    "gelu_kernels.gelu_gradient by tanh": ("*{0} *{0} *{0} *fp32 i32 i32! i32 1 16 128 1", 4),
    "norm_kernels.norm_gradient": ("*{0} *{0} *{0} *fp32 *fp32 *{0} *{0} *fp32 *fp32 i32 i32! 1 0 2 1024 3", 4),
    "norm_kernels.norm_gradient beside": ("*{0} *{0} *{0} *fp32 *fp32 *{0} *{0} *fp32 *fp32 i32 i32! 1 1 2 1024 3", 4),
    "norm_kernels.norm_gradient uncentred": (
        "*{0} *{0} *{0} *fp32 *fp32 *{0} *{0} *fp32 *fp32 i32 i32! 0 0 1 4096 3",
        8,
    ),
    "elementwise_kernels.swiglu": ("*{0} *{0} i64! i32! 1024", 4),
    "elementwise_kernels.swiglu_gradient": ("*{0} *{0} *{0} i64! i64! i32! 1024", 4),
    "elementwise_kernels.rotate": ("*{0} *{0} *{0} *{0} i64! i64! i32! i32! i32! i32 i32 i32! i32! -1 16 64", 4),
}
#: Those that write a tensor as large as what they read.
WRITERS = ("row_gradient", "norm_gradient", "gelu", "gelu_gradient", "swiglu", "swiglu_gradient", "rotate")


@cache
def compiled(name: str, dtype: str) -> Mapping[str, Any]:
    """The stages of a kernel, by their names; the last is ``cubin``."""
    pytest.importorskip("triton")  # which the kernels' modules import
    module, _, function = name.partition(" ")[0].partition(".")
    kernel = getattr(import_module(f"megatron_run_engine.nn.fused.{module}"), function)
    arguments, warps = KERNELS[name]
    found: Mapping[str, Any] = compile_kernel(kernel, arguments.format(dtype), num_warps=warps).asm
    return found


def accesses(stages: Mapping[str, Any], kind: str) -> set[str]:
    """The widths of the accesses to memory of a ``kind``, such as ``v4.b32``."""
    return set(re.findall(rf"{kind}\.global\.([\w.]+)", stages["ptx"]))


@pytest.mark.te
@pytest.mark.parametrize("dtype", ["bf16", *(pytest.param(each, marks=pytest.mark.nightly) for each in TYPES[1:])])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_and_reads_16_bytes_at_a_time(name: str, dtype: str) -> None:
    stages = compiled(name, dtype)
    assert stages["cubin"]
    # What is fetched ahead comes by copies of 16 bytes into shared memory.
    assert "v4.b32" in accesses(stages, "ld") or "cp.async.cg.shared.global" in stages["ptx"]
    assert not re.search(r"\.local\.", stages["ptx"]), "registers do not suffice"


@pytest.mark.te
@pytest.mark.parametrize(("features", "bytes_of_one"), [(2048, 2), (4096, 4), (WIDEST_NORM, 2), (WIDEST_NORM, 4)])
def test_what_a_norm_fetches_ahead_fits_into_shared_memory(features: int, bytes_of_one: int) -> None:
    pytest.importorskip("triton")
    from megatron_run_engine.nn.fused.norm_kernels import norm_gradient

    dtype, rows = {2: "bf16", 4: "fp32"}[bytes_of_one], norm_rows.rows_of(features)
    stages = norm_rows.stages_of(3 * features * rows * bytes_of_one)
    given = (
        f"*{dtype} *{dtype} *{dtype} *fp32 *fp32 *{dtype} *{dtype} *fp32 *fp32 i32 i32! 1 1 {rows} {features} {stages}"
    )
    warps = min(norm_rows.WARPS, features * rows // (32 * norm_rows.OF_A_THREAD))
    shared = compile_kernel(norm_gradient, given, num_warps=warps).metadata.shared
    assert shared <= norm_rows.AHEAD + 2**15  # and what the warps of a program exchange


@pytest.mark.te
@pytest.mark.parametrize("name", [name for name in KERNELS if name.rpartition(".")[2] in WRITERS])
def test_what_is_as_large_as_its_input_is_written_16_bytes_at_a_time(name: str) -> None:
    assert "v4.b32" in accesses(compiled(name, "bf16"), "st")
