"""The kernels of GeLU against float64, and a linear layer before it: by Triton's interpreter, and on a GPU.

All of what is interpreted runs in one process, once for the file.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import Init, LinearPart, LinearSpec
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn.fused import fused_gelu, fused_gelu_gradient, fuses, gelu_rows
from megatron_run_engine.nn.gelu import Gelu, Terms
from megatron_run_engine.nn.linear import linear
from megatron_run_engine.nn.mlp import Mlp
from megatron_run_engine.nn.parallel import LayerSplit, column_linear
from megatron_run_engine.runtime.comm import ALONE
from megatron_run_engine.runtime.gradients import main_grad, own_main_grad
from megatron_run_testing.build_contexts import single_process_context

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS = {"none": False, "tanh": True}
#: Rows and features: less than a tile, more than one either way, and nothing.
SHAPES = ((3, 5), (37, 130), (0, 7))
CASES = list(product(TYPES, FORMS, SHAPES))
#: How a layer is computed: at once, in a split backward, and inside of a region of one rank.
WAYS = ("at once", "split", "column")


class Activated(NamedTuple):
    """GeLU of x, the gradient of x, and that gradient's terms."""

    result: Tensor
    of_x: Tensor
    terms: Tensor


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


def activated(device: str = "cpu") -> list[Activated]:
    """Each case by the kernels; four programs have several tiles each."""
    found = []
    for dtype, form, shape in CASES:
        x, grad = (values(*shape, seed=seed).to(device, TYPES[dtype]) for seed in (1, 2))
        assert fuses(x)
        with mock.patch.object(gelu_rows, "PROGRAMS", 4):
            gradient = fused_gelu_gradient(grad, x, tanh=FORMS[form])
        found.append(Activated(fused_gelu(x, tanh=FORMS[form]), *gradient))
    return found


def tails(device: str = "cpu") -> dict[str, Tensor]:
    """GeLU and its slope at large numbers of either sign."""
    x = torch.tensor([-1e4, -30.0, -6.0, -5.0, -4.0, 4.0, 5.0, 6.0, 30.0, 1e4], device=device)
    ones = torch.ones_like(x)
    return {
        form: torch.stack((fused_gelu(x, tanh=tanh), fused_gelu_gradient(ones, x, tanh=tanh)[0]))
        for form, tanh in FORMS.items()
    }


def in_layer(way: str, form: str, device: str = "cpu", totals: torch.dtype = torch.float32) -> list[Tensor]:
    """The result of a linear layer that ends in GeLU, and the gradients that arrive at x and in ``main_grad``."""
    context = single_process_context()
    weight, bias = (nn.Parameter(values(*shape, seed=5).to(device)) for shape in ((7, 12), (7,)))
    for parameter in (weight, bias):
        own_main_grad(parameter)
        parameter.main_grad = main_grad(parameter).to(totals)  # type: ignore[attr-defined]
    x, grad = values(5, 2, 12).to(device).requires_grad_(), values(5, 2, 7, seed=3).to(device)
    end = Gelu(tanh=FORMS[form])
    if way == "column":
        result = column_linear(x, weight, bias, context.gradients, LayerSplit(ALONE), activation=end)
    else:
        result = linear(x, weight, bias, context.gradients, activation=end)
    if way == "split":
        with context.gradients.deferring((0, 0)):
            result.backward(grad)
        assert not main_grad(bias).any()
        context.gradients.run_deferred((0, 0))
    else:
        result.backward(grad)
    assert x.grad is not None
    return [result.detach(), x.grad, main_grad(weight), main_grad(bias)]


def widest_sum(device: str = "cpu") -> tuple[int, int]:
    """The number of rows that the gradients of a feed-forward layer's two biases are summed from, of 20 tokens."""
    context = single_process_context()
    layers, rows = DenseLayers(context), list[int]()
    spec: Any = mock.Mock(hidden=12, bias=True, activation="gelu", init=Init("zeros"), residual_init=Init("zeros"))
    mlp = Mlp(layers, spec, 48).to(device, torch.float32)
    for parameter in mlp.parameters():
        own_main_grad(parameter)
    with mock.patch("megatron_run_engine.nn.linear.add_rows", lambda _, matrix: rows.append(len(matrix))):
        mlp(values(10, 2, 12).to(device)).sum().backward()
    of_output, of_input = rows
    return of_input, of_output


def everything() -> dict[str, Any]:
    """All that is interpreted."""
    return {
        "activated": activated(),
        "tails": tails(),
        "layers": {(way, form): in_layer(way, form) for way, form in product(WAYS, FORMS)},
        "narrow": in_layer("at once", "none", totals=torch.bfloat16),
        "widest": widest_sum(),
    }


def check_activated(found: Activated, dtype: str, form: str, shape: tuple[int, int]) -> None:
    x, grad = (values(*shape, seed=seed).to(TYPES[dtype]).double() for seed in (1, 2))
    result = F.gelu(x.requires_grad_(), approximate=form)
    (of_x,) = torch.autograd.grad(result, x, grad)
    rounding = max(torch.finfo(TYPES[dtype]).eps, 1e-5)
    for each, exact in zip(found[:2], (result.detach(), of_x), strict=True):
        assert each.dtype == TYPES[dtype]
        torch.testing.assert_close(each.cpu().double(), exact, rtol=rounding, atol=1e-6)
    assert found.terms.dtype == torch.float32
    torch.testing.assert_close(found.terms.sum(0).cpu().double(), of_x.sum(0), rtol=1e-5, atol=1e-4)


def check_tails(found: dict[str, Tensor]) -> None:
    x = torch.tensor([-1e4, -30.0, -6.0, -5.0, -4.0, 4.0, 5.0, 6.0, 30.0, 1e4]).double().requires_grad_()
    for form, values_and_slopes in found.items():
        result = F.gelu(x, approximate=form)
        expected = torch.stack((result.detach(), torch.autograd.grad(result.sum(), x)[0]))
        # Far below zero one term is left of the cdf; torch's 1 + erf is zero there in fp32.
        torch.testing.assert_close(values_and_slopes.cpu().double(), expected, rtol=5e-3, atol=1e-30)


def check_layer(found: list[Tensor], form: str, totals: torch.dtype = torch.float32) -> None:
    weight, bias = (values(*shape, seed=5).double().requires_grad_() for shape in ((7, 12), (7,)))
    x, grad = values(5, 2, 12).double().requires_grad_(), values(5, 2, 7, seed=3).double()
    result = F.gelu(F.linear(x, weight, bias), approximate=form)
    expected = (result.detach(), *torch.autograd.grad(result, (x, weight, bias), grad))
    for value, exact in zip(found, expected, strict=True):
        rounding = max(torch.finfo(value.dtype).eps, 1e-4)
        torch.testing.assert_close(value.cpu().double(), exact, rtol=rounding, atol=1e-4)
    assert {value.dtype for value in found[2:]} == {totals}


@pytest.mark.multiproc
class TestInterpreted:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_gelu_and_its_gradient_are_those_of_float64(self, found: dict[str, Any], case: Any) -> None:
        check_activated(found["activated"][CASES.index(case)], *case)

    def test_large_numbers_of_either_sign_keep_their_digits(self, found: dict[str, Any]) -> None:
        check_tails(found["tails"])

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("way", WAYS)
    def test_a_layer_that_ends_in_it_has_the_same_gradients(self, found: dict[str, Any], way: str, form: str) -> None:
        check_layer(found["layers"][way, form], form)

    def test_totals_of_16_bits_get_sums_that_are_rounded_once(self, found: dict[str, Any]) -> None:
        check_layer(found["narrow"], "none", torch.bfloat16)

    def test_the_gradient_of_the_wide_bias_takes_no_pass_over_all_rows(self, found: dict[str, Any]) -> None:
        of_input, of_output = found["widest"]
        assert of_output == 20
        assert of_input < 20


@pytest.mark.gpu
class TestOnGpu:
    def test_gelu_and_its_gradient_are_those_of_float64(self) -> None:
        for case, result in zip(CASES, activated("cuda"), strict=True):
            check_activated(result, *case)

    def test_large_numbers_of_either_sign_keep_their_digits(self) -> None:
        check_tails(tails("cuda"))

    def test_layers_that_end_in_it_have_the_same_gradients(self) -> None:
        for way, form in product(WAYS, FORMS):
            check_layer(in_layer(way, form, "cuda"), form)
        check_layer(in_layer("at once", "none", "cuda", torch.bfloat16), "none", torch.bfloat16)


@pytest.mark.parametrize("way", ["trained", "frozen bias", "no bias", "evaluated"])
def test_elsewhere_the_result_and_gradients_are_those_of_the_layer_and_then_gelu(way: str) -> None:
    """A CPU's bits; and on any device where there is no bias whose gradient could be had with GeLU's."""
    context, found = single_process_context(), []
    for fused in (True, False):
        weight, bias = (nn.Parameter(values(*shape, seed=5)) for shape in ((7, 12), (7,)))
        bias.requires_grad_(way != "frozen bias")
        own_main_grad(weight)
        own_main_grad(bias)
        given = weight, None if way == "no bias" else bias, context.gradients
        x, end = values(5, 2, 12).requires_grad_(), Gelu()
        with torch.set_grad_enabled(way != "evaluated"):
            y = linear(x, *given, activation=end) if fused else F.gelu(linear(x, *given))
        if way != "evaluated":
            y.square().sum().backward()
            found.append([y.detach(), x.grad, main_grad(weight), main_grad(bias)])
        else:
            found.append([y])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_feed_forward_layer_hands_its_activation_only_to_layers_that_take_it() -> None:
    context = single_process_context()
    part = (LinearPart("up", 8),)
    spec: Any = mock.Mock(hidden=12, bias=True, activation="gelu", init=Init("zeros"), residual_init=Init("zeros"))
    mlp = Mlp(DenseLayers(context), spec, 8)
    assert mlp.activates
    plain = DenseLayers(context).column_linear(LinearSpec(12, part, Init("zeros"), bias=True))
    mlp.input = nn.Sequential(plain)  # as layers of other factories, or wrapped ones, are
    assert not mlp.activates
    assert mlp(torch.zeros(3, 1, 12, dtype=torch.float64)).shape == (3, 1, 12)


def test_terms_are_kept_until_they_are_taken() -> None:
    """They would wait in memory for as long as autograd's graph does."""
    terms, rows = Terms(), torch.ones(2, 3)
    terms.leave(rows)
    assert terms.take() is rows
    with pytest.raises(AssertionError, match="comes before"):
        terms.take()
