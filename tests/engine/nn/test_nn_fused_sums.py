"""The kernels of sums over rows and of norms against float64: by Triton's interpreter, and on a GPU.

All of what is interpreted runs in one process, once for the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run_engine.nn.fused import add_column_sums, column_sums, fuses, norm_gradients
from megatron_run_engine.nn.linear import linear
from megatron_run_engine.nn.norm import LayerNorm, RmsNorm
from megatron_run_engine.runtime.gradients import main_grad, own_main_grad
from megatron_run_testing.build_contexts import single_process_context
from tests.support.interpreted import interpreted

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Rows and columns: few rows, for one kernel, in blocks of which the last is not full; many, in parts of which the last
#: is not full, and more columns than a program has; and no rows.
SHAPES = ((3, 5), (300, 130), (1000, 16), (1009, 130), (0, 7))
#: Rows and features of norms: some rows of one program, and rows of several programs.
NORMS = ((5, 11), (70, 96), (3, 5000))
KINDS = ("layernorm", "rmsnorm")


class Norm(NamedTuple):
    """A norm's case; with ``beside`` x gets a gradient from elsewhere too."""

    dtype: str
    kind: str
    shape: tuple[int, int]
    beside: bool = False


CASES = [Norm(*each) for each in product(TYPES, KINDS, NORMS)]
#: More rows than programs, which take them in turns.
CASES.append(Norm("bf16", "rmsnorm", (540, 2100)))
CASES += [Norm(*each, (70, 96), beside=True) for each in product(TYPES, KINDS)]
#: Each kind with each shape, in one type after the other: those that the interpreter runs every time.
FEW = [Norm(dtype, *each) for each, dtype in zip(product(KINDS, NORMS), cycle(TYPES), strict=False)]
FEW += [Norm("bf16", "rmsnorm", (540, 2100)), *(Norm("bf16", kind, (70, 96), beside=True) for kind in KINDS)]


def matrix(shape: tuple[int, int], dtype: str, seed: int = 1) -> Tensor:
    """Values whose columns have sums of their own."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(TYPES[dtype])


def summed(device: str = "cpu") -> list[Tensor]:
    """By the kernels, added to ones."""
    found = []
    for shape, dtype in product(SHAPES, TYPES):
        total, rows = torch.ones(shape[1], device=device), matrix(shape, dtype).to(device)
        assert fuses(rows)
        add_column_sums(total, rows)
        found.append(total)
    return found


def summed_by_few(device: str = "cpu") -> list[Tensor]:
    """The same by so few programs that each has several blocks of rows."""
    with mock.patch.object(column_sums, "PROGRAMS", 4):
        return summed(device)


def statistics(x: Tensor, kind: str) -> tuple[Tensor | None, Tensor]:
    """Mean, where there is one, and 1/deviation of the rows of ``x``, in its type."""
    mean = x.mean(1) if kind == "layernorm" else None
    centred = x if mean is None else x - mean[:, None]
    return mean, (centred.square().mean(1) + 1e-5).rsqrt()


def normed(cases: Sequence[Norm], device: str = "cpu") -> list[tuple[Tensor, ...]]:
    """The gradients of x, weight and bias of each case, by the kernels."""
    found = []
    for dtype, kind, shape, beside in cases:
        x, grad = (matrix(shape, dtype, seed).to(device) for seed in (1, 2))
        weight = matrix((1, shape[1]), dtype, 3)[0].to(device)
        mean, scale = statistics(x.double(), kind)
        other = matrix(shape, dtype, 4).to(device) if beside else None
        result = norm_gradients(grad, x, weight, None if mean is None else mean.float(), scale.float(), other)
        found.append((result[0], *(each.double().sum(0) for each in result[1:])))
    return found


def in_layers(device: str = "cpu", totals: torch.dtype = torch.float32) -> dict[str, list[Tensor]]:
    """The gradients that arrive at x and in ``main_grad`` where a linear layer follows a norm, in fp32.

    Each ``main_grad`` has the type of the ``totals``.
    """
    context, found = single_process_context(), {}
    for kind, made in {"layernorm": LayerNorm, "rmsnorm": RmsNorm}.items():
        norm = made(context, 12, 1e-5).to(device, torch.float32)  # the context's are float64
        weight, bias = (torch.nn.Parameter(matrix(shape, "fp32", 5).to(device)) for shape in ((7, 12), (1, 7)))
        bias = torch.nn.Parameter(bias[0].detach().clone())
        with torch.no_grad():
            for index, parameter in enumerate(norm.parameters()):
                parameter.copy_(matrix((1, 12), "fp32", 6 + index)[0])
        for parameter in (*norm.parameters(), weight, bias):
            own_main_grad(parameter)
            parameter.main_grad = main_grad(parameter).to(totals)  # type: ignore[attr-defined]
        x = matrix((10, 12), "fp32").view(5, 2, 12).to(device).requires_grad_()
        linear(norm(x), weight, bias, context.gradients).square().sum().backward()
        assert x.grad is not None
        assert all(parameter.grad is None for parameter in norm.parameters())
        found[kind] = [x.grad, *(main_grad(each) for each in (*norm.parameters(), bias))]
    return found


def of_autograd(kind: str) -> list[Tensor]:
    """The same by PyTorch in float64."""
    x = matrix((10, 12), "fp32").view(5, 2, 12).double().requires_grad_()
    scale, shift = (matrix((1, 12), "fp32", 6 + index)[0].double().requires_grad_() for index in range(2))
    weight, bias = matrix((7, 12), "fp32", 5).double(), matrix((1, 7), "fp32", 5)[0].double().requires_grad_()
    norm = F.layer_norm(x, (12,), scale, shift, 1e-5) if kind == "layernorm" else F.rms_norm(x, (12,), scale, 1e-5)
    learnt = (x, scale, shift, bias) if kind == "layernorm" else (x, scale, bias)
    return list(torch.autograd.grad(F.linear(norm, weight, bias).square().sum(), learnt))


def everything() -> dict[str, Any]:
    """All that is interpreted."""
    return {
        "sums": summed(),
        "sums by few": summed_by_few(),
        "norms": normed(FEW),
        "layers": in_layers(),
        "narrow": in_layers(totals=torch.bfloat16),
    }


def check_sums(found: list[Tensor]) -> None:
    for (shape, dtype), total in zip(product(SHAPES, TYPES), found, strict=True):
        expected = 1 + matrix(shape, dtype).double().sum(0)
        torch.testing.assert_close(total.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def check_norm(found: tuple[Tensor, ...], case: Norm) -> None:
    x, grad = (matrix(case.shape, case.dtype, seed).double() for seed in (1, 2))
    weight, bias = matrix((1, case.shape[1]), case.dtype, 3)[0].double(), torch.zeros(case.shape[1]).double()
    learnt = [each.requires_grad_() for each in (x, weight, bias)]
    if case.kind == "layernorm":
        result = F.layer_norm(x, weight.shape, weight, bias, 1e-5)
    else:
        result = F.rms_norm(x, weight.shape, weight, 1e-5) + bias
    expected = torch.autograd.grad(result, learnt, grad)
    of_x = expected[0] + matrix(case.shape, case.dtype, 4).double() if case.beside else expected[0]
    rounding = max(torch.finfo(TYPES[case.dtype]).eps, 1e-5)
    assert found[0].dtype == TYPES[case.dtype]
    torch.testing.assert_close(found[0].cpu().double(), of_x, rtol=rounding, atol=rounding)
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-5, atol=1e-4)
    if case.kind == "layernorm":
        torch.testing.assert_close(found[2].cpu(), expected[2], rtol=1e-5, atol=1e-4)


def check_layers(found: dict[str, list[Tensor]], totals: torch.dtype = torch.float32) -> None:
    for kind, values in found.items():
        for value, expected in zip(values, of_autograd(kind), strict=True):
            rounding = max(torch.finfo(value.dtype).eps, 1e-4)
            torch.testing.assert_close(value.cpu().double(), expected, rtol=rounding, atol=1e-4)
        assert {value.dtype for value in values[1:]} == {totals}


@pytest.mark.multiproc
class TestInterpreted:
    def test_columns_are_summed_in_fp32(self, found: dict[str, Any]) -> None:
        check_sums(found["sums"])
        check_sums(found["sums by few"])

    @pytest.mark.parametrize("case", FEW, ids=str)
    def test_gradients_of_a_norm_are_those_of_float64(self, found: dict[str, Any], case: Norm) -> None:
        check_norm(found["norms"][FEW.index(case)], case)

    @pytest.mark.nightly
    def test_gradients_of_norms_of_each_type_and_shape_are_those_of_float64(self) -> None:
        for case, result in zip(CASES, interpreted(normed, CASES), strict=True):
            check_norm(result, case)

    def test_layers_leave_them_in_main_grad(self, found: dict[str, Any]) -> None:
        check_layers(found["layers"])

    def test_totals_of_16_bits_get_sums_that_are_rounded_once(self, found: dict[str, Any]) -> None:
        """As with ``optimizer.grad_dtype=param``."""
        check_layers(found["narrow"], torch.bfloat16)


@pytest.mark.gpu
class TestOnGpu:
    def test_columns_are_summed_in_fp32(self) -> None:
        check_sums(summed("cuda"))
        check_sums(summed_by_few("cuda"))

    def test_gradients_of_norms_are_those_of_float64(self) -> None:
        for case, result in zip(CASES, normed(CASES, "cuda"), strict=True):
            check_norm(result, case)

    def test_layers_leave_them_in_main_grad(self) -> None:
        check_layers(in_layers("cuda"))
        check_layers(in_layers("cuda", torch.bfloat16), torch.bfloat16)

    def test_sums_of_many_rows_are_the_same_in_each_run(self) -> None:
        rows = torch.randn(16_384, 3072, device="cuda", dtype=torch.bfloat16)
        totals = [torch.zeros(3072, device="cuda") for _ in range(2)]
        for total in totals:
            add_column_sums(total, rows)
        assert torch.equal(*totals)
        torch.testing.assert_close(totals[0].double(), rows.double().sum(0), rtol=1e-4, atol=1e-2)
