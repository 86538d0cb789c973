"""The kernels of SwiGLU and of rotary positions against float64: by Triton's interpreter, and on a GPU.

All of what is interpreted runs in one process, once for the file.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run_engine.nn.fused import fuses, rotated
from megatron_run_engine.nn.mlp import swiglu

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Features of gate and of up: less than a program has, and more.
FEATURES = (11, 1030)
#: Heads, head size and rotated features: all of them, and some; more heads than a program has.
HEADS = ((3, 10, 10), (2, 12, 4), (70, 32, 32))
#: Sequence and micro batch.
S, B = 3, 2

SWIGLU = list(product(TYPES, FEATURES))
ROTARY = list(product(TYPES, HEADS, (False, True)))


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


def gated(dtype: str, features: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A result and the gradient of x, a part of wider rows, by the kernels."""
    wide = values(S, B, 2 * features + 5).to(device, TYPES[dtype])
    x, grad = wide[..., : 2 * features].requires_grad_(), values(S, B, features, seed=2).to(device, TYPES[dtype])
    assert fuses(x)
    result = swiglu(x)
    return result.detach(), torch.autograd.grad(result, x, grad)[0]


def angles(rotated_features: int, *, per_text: bool) -> tuple[Tensor, Tensor]:
    """Cosine and sine of angles [s, 1 or b, 1, r/2]."""
    angle = values(S, B if per_text else 1, 1, rotated_features // 2, seed=3)
    return angle.cos(), angle.sin()


def turned(dtype: str, shape: tuple[int, int, int], per_text: bool, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Rotated heads, which are some of those of a tensor, and the gradient of x, by the kernel."""
    heads, size, features = shape
    x = values(S, B, heads + 1, size).to(device, TYPES[dtype])[:, :, :heads].requires_grad_()
    cos, sin = (each.to(device, TYPES[dtype]) for each in angles(features, per_text=per_text))
    result = rotated(x, cos, sin)
    grad = values(S, B, heads, size, seed=2).to(device, TYPES[dtype])
    return result.detach(), torch.autograd.grad(result, x, grad)[0]


def distant(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The last of 65 heads that lie outermost, 2^31 values from the first, and the same by the kernel in one piece."""
    step = 2**25
    wide = torch.empty(64 * step + 16, dtype=torch.float16, device=device)  # pages that nobody writes take no memory
    heads = wide.as_strided((1, 1, 65, 16), (0, 0, step, 1))
    heads.copy_(values(1, 1, 65, 16))
    cos, sin = (each[:1, :1].to(device, torch.float16) for each in angles(16, per_text=False))
    with torch.no_grad():
        return rotated(heads, cos, sin)[0, 0, -1], rotated(heads.contiguous(), cos, sin)[0, 0, -1]


def one_vector(device: str = "cpu") -> Tensor:
    """The gate and up of one token, without other dimensions, by the kernels: result and gradient."""
    x = values(8).to(device).requires_grad_()
    result = swiglu(x)
    return torch.cat((result.detach(), torch.autograd.grad(result.sum(), x)[0]))


def everything() -> dict[str, Any]:
    """All that is interpreted."""
    return {
        "swiglu": [gated(*case) for case in SWIGLU],
        "rotary": [turned(*case) for case in ROTARY],
        "distant": distant(),
        "one vector": one_vector(),
    }


def close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: str) -> None:
    rounding = max(torch.finfo(TYPES[dtype]).eps, 1e-5)
    for each, exact in zip(found, expected, strict=True):
        assert each.dtype == TYPES[dtype]
        torch.testing.assert_close(each.cpu().double(), exact, rtol=rounding, atol=1e-6)


def check_gated(found: tuple[Tensor, Tensor], dtype: str, features: int) -> None:
    x = values(S, B, 2 * features + 5).to(TYPES[dtype])[..., : 2 * features].double().requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    result = F.silu(gate) * up
    grad = values(S, B, features, seed=2).to(TYPES[dtype]).double()
    close(found, (result.detach(), torch.autograd.grad(result, x, grad)[0]), dtype)


def check_turned(found: tuple[Tensor, Tensor], dtype: str, shape: tuple[int, int, int], per_text: bool) -> None:
    heads, size, features = shape
    x = values(S, B, heads + 1, size).to(TYPES[dtype])[:, :, :heads].double().requires_grad_()
    cos, sin = (each.to(TYPES[dtype]).double() for each in angles(features, per_text=per_text))
    first, second = x[..., :features].chunk(2, dim=-1)
    result = torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., features:]), dim=-1)
    grad = values(S, B, heads, size, seed=2).to(TYPES[dtype]).double()
    close(found, (result.detach(), torch.autograd.grad(result, x, grad)[0]), dtype)


def check_one_vector(found: Tensor) -> None:
    x = values(8).double().requires_grad_()
    result = F.silu(x[:4]) * x[4:]
    expected = torch.cat((result.detach(), torch.autograd.grad(result.sum(), x)[0]))
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.multiproc
class TestInterpreted:
    def test_swiglu_takes_one_vector(self, found: dict[str, Any]) -> None:
        check_one_vector(found["one vector"])

    def test_heads_beyond_32_bit_offsets_are_rotated(self, found: dict[str, Any]) -> None:
        assert torch.equal(*found["distant"])

    @pytest.mark.parametrize("case", SWIGLU, ids=str)
    def test_swiglu_and_its_gradient_are_those_of_float64(self, found: dict[str, Any], case: tuple[str, int]) -> None:
        check_gated(found["swiglu"][SWIGLU.index(case)], *case)

    @pytest.mark.parametrize("case", ROTARY, ids=str)
    def test_rotated_heads_and_their_gradient_are_those_of_float64(self, found: dict[str, Any], case: Any) -> None:
        check_turned(found["rotary"][ROTARY.index(case)], *case)


@pytest.mark.gpu
class TestOnGpu:
    def test_swiglu_takes_one_vector(self) -> None:
        check_one_vector(one_vector("cuda"))

    def test_heads_beyond_32_bit_offsets_are_rotated(self) -> None:
        assert torch.equal(*distant("cuda"))

    def test_swiglu_and_its_gradient_are_those_of_float64(self) -> None:
        for case in SWIGLU:
            check_gated(gated(*case, "cuda"), *case)

    def test_rotated_heads_and_their_gradient_are_those_of_float64(self) -> None:
        for case in ROTARY:
            check_turned(turned(*case, "cuda"), *case)
