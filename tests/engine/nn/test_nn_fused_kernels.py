"""The kernels compile for a GPU of NVIDIA's Hopper generation, as Triton would on one; no GPU is needed for that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

#: By kernel: the types of its arguments in order, with a * before those of pointers, and the values of constants.
#: Pointers and what ends in ``!`` are multiples of 16, as torch's tensors and padded sizes are.
LOSS_STATISTICS = "*{0} *i64 *fp32 i64! i32 i32! i32 {1} 4096"
LOSS_GRADIENT = "*{0} *{0} *i64 *i1 *fp32 *fp32 *fp32 i64! i64! i32! i32 fp32 fp32 4096"
TYPES = ("bf16", "fp16", "fp32")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module of the loss's kernels; what is compiled goes to a folder of the test's own."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return import_module("megatron_run_engine.nn.fused.loss_kernels")


def compiled(kernel: Any, arguments: str, warps: int = 8) -> Mapping[str, Any]:
    """The stages of ``kernel`` for arguments of these types, by their names; the last is ``cubin``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    words = dict(zip(kernel.arg_names, arguments.split(), strict=True))
    constants = {name: int(word) for name, word in words.items() if word.isdecimal()}
    types = {name: "constexpr" if name in constants else word.rstrip("!") for name, word in words.items()}
    even = [index for index, word in enumerate(words.values()) if word[0] == "*" or word[-1] == "!"]
    source = ASTSource(kernel, types, constants, {(index,): [["tt.divisibility", 16]] for index in even})
    found: Mapping[str, Any] = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    ).asm
    return found


def accesses(stages: Mapping[str, Any], kind: str) -> set[str]:
    """The widths of the accesses to memory of a ``kind``, such as ``v4.b32``."""
    return set(re.findall(rf"{kind}\.global\.([\w.]+)", stages["ptx"]))


@pytest.mark.te
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("spreads", [0, 1])
def test_statistics_of_rows_read_16_bytes_at_a_time(kernels: ModuleType, dtype: str, spreads: int) -> None:
    stages = compiled(kernels.row_statistics, LOSS_STATISTICS.format(dtype, spreads))
    assert stages["cubin"]
    assert "v4.b32" in accesses(stages, "ld")


@pytest.mark.te
@pytest.mark.parametrize("dtype", TYPES)
def test_the_gradient_reads_and_writes_16_bytes_at_a_time(kernels: ModuleType, dtype: str) -> None:
    stages = compiled(kernels.row_gradient, LOSS_GRADIENT.format(dtype))
    assert stages["cubin"]
    assert "v4.b32" in accesses(stages, "ld")
    assert accesses(stages, "st") == {"v4.b32"}
