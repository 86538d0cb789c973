"""Compiles a Triton kernel for a GPU of NVIDIA's Hopper generation, as Triton would on one; no GPU is needed."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import pytest


def compile_kernel(kernel: Any, arguments: str, **options: int) -> Any:
    """Triton's compiled kernel: its ``asm`` holds the stages by name, of which the last is ``cubin``.

    ``arguments`` are the types of the kernel's arguments in order, with a * before those of pointers, and the values of
    its constants. Pointers, and numbers that end in ``!``, are multiples of 16, as torch's tensors and padded sizes
    are. ``options`` are those of the launch, such as ``num_warps``. Skips the test without Triton.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip(kernel.arg_names, arguments.split(), strict=True))
    constants = {name: int(value) for name, value in given.items() if value.lstrip("-").isdecimal()}
    types = {name: "constexpr" if name in constants else value.rstrip("!") for name, value in given.items()}
    even = [index for index, value in enumerate(given.values()) if value[0] == "*" or value[-1] == "!"]
    source = ASTSource(kernel, types, constants, {(index,): [["tt.divisibility", 16]] for index in even})
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", folder)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
