"""The linear layer whose backward can be split."""

from collections.abc import Iterator
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.nn import Parameter

from megatron_run_engine.nn.linear import _gemm, _slow_in_bf16, _widens, add_product, linear
from megatron_run_engine.runtime.gradients import GradientAccumulator, main_grad

LINEAR = import_module(add_product.__module__)  # the package has a function of this name


def parameter(*shape: int) -> Parameter:
    """A random parameter with an empty main_grad, as the kernel leaves it."""
    made = Parameter(torch.randn(shape, dtype=torch.float64))
    made.main_grad = torch.zeros(shape, dtype=torch.float64)  # type: ignore[attr-defined]  # the engine's attribute
    return made


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Output and gradients by plain autograd."""
    inputs = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = inputs[0] @ inputs[1].T + (inputs[2] if bias is not None else 0)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize("leading", [(5,), (3, 2), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_output_and_gradients_are_those_of_autograd(leading: tuple[int, ...], with_bias: bool) -> None:
    x, weight, bias = torch.randn(*leading, 4).double(), parameter(7, 4), parameter(7) if with_bias else None
    grad = torch.randn(*leading, 7).double()
    y, *gradients = reference(x, weight, bias, grad)
    x.requires_grad_()
    found = linear(x, weight, bias, GradientAccumulator())
    found.backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(found, y)
    found_gradients = [x.grad, main_grad(weight), *([] if bias is None else [main_grad(bias)])]
    torch.testing.assert_close(found_gradients, gradients)
    assert weight.grad is None


def test_microbatches_add_up() -> None:
    x, weight, bias = torch.randn(3, 4).double(), parameter(7, 4), parameter(7)
    for _ in range(3):
        linear(x, weight, bias, GradientAccumulator()).sum().backward()
    expected = 3 * x.sum(0).expand(7, 4)
    torch.testing.assert_close(main_grad(weight), expected)
    torch.testing.assert_close(main_grad(bias), torch.full((7,), 9.0).double())


def test_a_split_backward_gives_the_input_gradient_first_and_the_weight_gradient_when_asked() -> None:
    gradients, weight, bias = GradientAccumulator(), parameter(7, 4), parameter(7)
    x = torch.randn(3, 4).double().requires_grad_()
    with gradients.deferring((0, 0)):
        linear(x, weight, bias, gradients).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(3, 4))
    assert not main_grad(weight).any()
    gradients.run_deferred((0, 0))
    torch.testing.assert_close(main_grad(weight), x.detach().sum(0).expand(7, 4))
    torch.testing.assert_close(main_grad(bias), torch.full((7,), 3.0).double())


def test_a_gradient_that_is_not_contiguous_is_accumulated_right() -> None:
    x, weight = torch.randn(3, 2, 4).double(), parameter(7, 4)
    grad = torch.randn(7, 2, 3).double().permute(2, 1, 0)  # [3, 2, 7], strided
    linear(x, weight, None, GradientAccumulator()).backward(grad)
    torch.testing.assert_close(main_grad(weight), torch.einsum("abo,abi->oi", grad, x))


def test_a_frozen_weight_gets_nothing_and_passes_the_input_gradient() -> None:
    weight = parameter(7, 4).requires_grad_(False)
    x = torch.randn(3, 4).double().requires_grad_()
    linear(x, weight, None, GradientAccumulator()).sum().backward()  # type: ignore[arg-type]  # a Parameter still
    assert x.grad is not None
    assert x.grad.any()
    assert not main_grad(weight).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_in_the_dtype_of_the_total(dtype: torch.dtype) -> None:
    left, right = torch.randn(4, 6).to(dtype), torch.randn(6, 5).to(dtype)
    total = torch.full((4, 5), 1000.0)
    add_product(total, left, right)
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    expected = 1000 + (left.double() @ right.double()).float()
    torch.testing.assert_close(total, expected, rtol=0, atol=tolerance)
    assert total.dtype == torch.float32


def wide_addmm(total: Tensor, left: Tensor, right: Tensor, wide: torch.dtype, *, out: Tensor, **_: float) -> Tensor:
    """What a GPU's kernel computes: the sums of 16-bit operands, never rounded to 16 bits."""
    return out.copy_(total + left.to(wide) @ right.to(wide))


@pytest.fixture
def _device_that_widens() -> Iterator[None]:
    """CPUs have no such kernel, so one is lent to them."""
    lent = Library("aten", "IMPL")
    lent.impl("addmm.dtype_out", wide_addmm, "CPU")
    _widens.cache_clear()
    yield
    lent._destroy()
    _widens.cache_clear()


def error_of_sums(dtype: torch.dtype) -> float:
    """The relative error of a weight gradient of 16 microbatches, against the same sum in float64."""
    weight = Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(dtype))
    weight.main_grad = torch.zeros(8, 16)  # type: ignore[attr-defined]
    exact, random = torch.zeros(8, 16).double(), torch.Generator().manual_seed(1)
    for _ in range(16):
        x = torch.randn(64, 16, generator=random).to(dtype).requires_grad_()
        grad = torch.randn(64, 8, generator=random).to(dtype)
        linear(x, weight, None, GradientAccumulator()).backward(grad)
        exact += grad.t().double() @ x.detach().double()
    return float((main_grad(weight).double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("dtype", "rounded"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-4)])
def test_a_device_that_widens_adds_16_bit_products_without_rounding_them(
    dtype: torch.dtype, rounded: float, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LINEAR, "_gemm", lambda: None)  # as on a CPU without AMX
    monkeypatch.setattr(LINEAR, "_SLOW_IN_BF16", False)
    assert error_of_sums(dtype) > rounded
    request.getfixturevalue("_device_that_widens")
    assert error_of_sums(dtype) < 1e-6


@pytest.mark.skipif(_gemm() is None, reason="a CPU without AMX")
def test_a_cpu_with_amx_adds_bf16_products_without_rounding_them() -> None:
    assert error_of_sums(torch.bfloat16) < 1e-6


def test_a_cpu_that_is_slow_in_bf16_adds_products_without_rounding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LINEAR, "_gemm", lambda: None)
    monkeypatch.setattr(LINEAR, "_SLOW_IN_BF16", True)
    assert error_of_sums(torch.bfloat16) < 1e-6
    assert error_of_sums(torch.float16) > 1e-4


@pytest.mark.parametrize(
    ("leading", "taken"), [((63,), torch.bfloat16), ((64,), torch.float32), ((16, 4), torch.float32)]
)
def test_a_cpu_that_is_slow_in_bf16_multiplies_enough_rows_in_fp32(
    leading: tuple[int, ...], taken: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[torch.dtype] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products.append(x.dtype)
        return x @ weight.t() + (0 if bias is None else bias)

    monkeypatch.setattr(LINEAR, "_SLOW_IN_BF16", True)
    monkeypatch.setattr(LINEAR.F, "linear", product)
    weight, bias = (Parameter(torch.randn(shape).bfloat16()) for shape in ((8, 16), (8,)))
    for each in (weight, bias):
        each.main_grad = torch.zeros(each.shape)  # type: ignore[attr-defined]  # the engine's attribute
    x, grad = torch.randn(*leading, 16).bfloat16().requires_grad_(), torch.randn(*leading, 8).bfloat16()
    y = linear(x, weight, bias, GradientAccumulator())
    y.backward(grad)
    assert products == [taken, taken]
    assert x.grad is not None
    exact = reference(x.double(), weight.double(), bias.double(), grad.double())
    torch.testing.assert_close(y.double(), exact[0], rtol=2**-8, atol=2e-2)
    torch.testing.assert_close(x.grad.double(), exact[1], rtol=2**-8, atol=2e-2)


def test_operands_of_other_devices_are_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LINEAR, "_SLOW_IN_BF16", True)
    rows = torch.empty(1024, 8, dtype=torch.bfloat16)
    assert LINEAR.widening_pays(rows)
    assert not LINEAR.widening_pays(rows.to("meta"))


@pytest.mark.parametrize(
    ("machine", "matrices", "products", "maker", "slow"),
    [
        ("x86_64", False, True, "GenuineIntel", True),
        ("x86_64", False, True, "AuthenticAMD", False),
        ("x86_64", False, True, None, False),
        ("x86_64", False, False, "AuthenticAMD", True),
        ("x86_64", True, True, "GenuineIntel", False),
        ("aarch64", False, False, None, False),
    ],
)
def test_bf16_is_slow_without_16_bit_products_and_with_intels(
    machine: str, matrices: bool, products: bool, maker: str | None, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(path: Path, encoding: str) -> StringIO:
        if maker is None:
            raise FileNotFoundError(path)
        return StringIO(f"processor\t: 0\nvendor_id\t: {maker}\nmodel name\t: any\n")

    monkeypatch.setattr(LINEAR.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: matrices)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: products)
    monkeypatch.setattr(Path, "open", described)
    assert _slow_in_bf16() is slow


def test_a_torch_that_does_not_tell_is_trusted_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert not _slow_in_bf16()


def test_the_layer_compiles_into_one_graph_on_a_cpu_that_is_slow_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LINEAR, "_SLOW_IN_BF16", True)
    weight, x = Parameter(torch.randn(8, 16).bfloat16()), torch.randn(64, 16).bfloat16()
    gradients = GradientAccumulator()
    with torch.no_grad():
        compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, weight, None, gradients), linear(x, weight, None, gradients))
