"""A product for each group of rows against autograd on one group at a time."""

from importlib import import_module
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from megatron_run_engine.nn import row_groups
from megatron_run_engine.nn.grouped import grouped_linear
from megatron_run_engine.nn.row_groups import EqualGroups, RowGroups, _has_onednn, _takes_grouped
from megatron_run_engine.runtime.gradients import GradientAccumulator, main_grad

#: Some without rows, the last all alike, which are told by one number; sizes that one call takes, and others.
COUNTS, SIZES = ([3, 0, 5, 1], [0, 0, 0, 0], [9, 0, 0, 0], [4, 4, 4, 4]), ((8, 16), (5, 7))

CPU = torch.device("cpu")


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> Parameter:
    made = Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype))
    made.main_grad = torch.zeros_like(made)  # type: ignore[attr-defined]  # as a bucket does
    return made


@pytest.mark.parametrize("way", ["oneDNN", "one call", "one product a group"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_values_and_gradients_are_those_of_each_group_alone(
    counts: list[int], inputs: int, outputs: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "one call":
        monkeypatch.setattr(row_groups, "_has_onednn", lambda *_: False)
    dtype = torch.float64 if way == "one product a group" else torch.float32
    rows = torch.randn(sum(counts), inputs, dtype=dtype, requires_grad=True)
    weight, bias = parameter(4 * outputs, inputs, dtype=dtype), parameter(4 * outputs, dtype=dtype)
    given = 4 if counts == [4] * 4 else torch.tensor(counts)
    y = grouped_linear(rows, weight, bias, given, GradientAccumulator(), bias_share=0.5)
    (of_rows,) = torch.autograd.grad(y, rows, torch.ones_like(y).cumsum(0))
    matrices, biases = weight.detach().view(4, outputs, inputs), bias.detach().view(4, outputs)
    leaves = [each.clone().requires_grad_() for each in (rows.detach(), matrices, biases)]
    parts = zip(leaves[0].split(counts), leaves[1], leaves[2], strict=True)
    expected = torch.cat([part @ matrix.T + 0.5 * shift for part, matrix, shift in parts])
    torch.testing.assert_close(y, expected)
    wanted = torch.autograd.grad(expected, leaves, torch.ones_like(y).cumsum(0))
    torch.testing.assert_close(of_rows, wanted[0])
    torch.testing.assert_close(main_grad(weight), wanted[1].flatten(0, 1))
    torch.testing.assert_close(main_grad(bias), wanted[2].flatten())


def test_weight_gradients_wait_for_their_action() -> None:
    gradients, weight = GradientAccumulator(), parameter(6, 4)
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = grouped_linear(rows, weight, None, torch.tensor([1, 2]), gradients)
    with gradients.deferring((0, 0)):
        torch.autograd.backward(y.sum())
    assert not main_grad(weight).any()
    gradients.run_deferred((0, 0))
    assert main_grad(weight).any()


def test_a_gradient_of_every_group_arrives_though_it_has_no_rows() -> None:
    """What never arrives holds up its bucket."""
    arrived: list[torch.Tensor] = []
    gradients, weight = GradientAccumulator(), parameter(6, 4)
    rows = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(2):  # arrivals are learned in the first step
        gradients.start_step(1, arrived.append)
        torch.autograd.backward(grouped_linear(rows, weight, None, torch.tensor([0, 0]), gradients).sum())
    assert len(arrived) == 1


def test_a_processor_takes_what_is_aligned_in_one_call() -> None:
    """Else two thirds of the cases above would try nothing new."""
    assert _has_onednn("cpu", torch.float32)
    assert not _has_onednn("cpu", torch.bfloat16)
    rows, matrices = torch.zeros(4, 8), torch.zeros(2, 8, 16)
    assert _takes_grouped(rows, matrices)
    assert _takes_grouped(rows, torch.zeros(2, 16, 8).transpose(1, 2))
    assert not _takes_grouped(torch.zeros(4, 5), torch.zeros(2, 5, 8))
    assert not _takes_grouped(rows.double(), matrices.double())


def test_sums_of_products_are_added_to_what_is_there() -> None:
    left, right = torch.randn(5, 8), torch.randn(5, 4)
    totals = torch.ones(2, 8, 4)
    RowGroups([*accumulate([2, 3])], CPU).add_products(totals, left, right)
    torch.testing.assert_close(totals, 1 + torch.stack([left[:2].T @ right[:2], left[2:].T @ right[2:]]))


@pytest.mark.parametrize("counts", [[2, 3, 4], [0, 5, 4], [9, 0, 0], [4, 5, 0]], ids=str)
def test_one_call_adds_nothing_to_a_group_without_rows(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the device's call makes of no rows."""
    careful = torch._grouped_mm

    def careless(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        products = careful(left, right, offs=offs)
        products[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return products

    monkeypatch.setattr(torch, "_grouped_mm", careless)
    left, right = torch.randn(9, 16), torch.randn(9, 8)
    totals = torch.ones(3, 16, 8)
    RowGroups([*accumulate(counts)], CPU).add_grouped(totals, left, right)
    parts = zip(left.split(counts), right.split(counts), strict=True)
    torch.testing.assert_close(totals, 1 + torch.stack([one.T @ other for one, other in parts]))


def test_products_of_groups_of_one_size_are_added_to_a_wider_total() -> None:
    left, right = (torch.randn(8, width, dtype=torch.bfloat16) for width in (3, 5))
    totals = torch.ones(2, 3, 5)
    EqualGroups(4, 8).add_products(totals, left, right)
    expected = 1 + left.float().view(2, 4, 3).transpose(1, 2) @ right.float().view(2, 4, 5)
    torch.testing.assert_close(totals, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("widens", [True, False])
def test_a_device_that_widens_adds_each_groups_16_bit_product_in_its_kernel(
    widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for all groups would round the products before it adds them; its types are equal elsewhere."""
    monkeypatch.setattr(row_groups, "can_widen", lambda *_: widens)
    monkeypatch.setattr(row_groups, "_takes_grouped", lambda *_: True)
    calls: list[str] = []
    monkeypatch.setattr(row_groups, "add_product", lambda *_: calls.append("a group"))
    monkeypatch.setattr(RowGroups, "add_grouped", lambda *_: calls.append("all"))
    groups, totals = RowGroups([*accumulate([2, 0, 3])], CPU), torch.zeros(3, 8, 4, device="meta")
    left, right = (torch.zeros(5, size, dtype=torch.bfloat16, device="meta") for size in (8, 4))
    groups.add_products(totals, left, right)
    assert calls == (["a group", "a group"] if widens else ["all"])
    calls.clear()
    groups.add_products(totals.bfloat16(), left, right)
    assert calls == ["all"]


def test_biases_take_as_many_kernels_for_many_groups_as_for_few() -> None:
    def kernels(groups: int) -> int:
        weight, bias = parameter(groups * 6, 4), parameter(groups * 6)
        rows = torch.randn(groups * 2, 4, dtype=torch.float64, requires_grad=True)
        counts = torch.full((groups,), 2)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:  # torch 2.11 warns without
            grouped_linear(rows, weight, bias, counts, GradientAccumulator()).sum().backward()
        return sum(event.name in ("aten::add_", "aten::sum", "aten::addmm_") for event in profiled.events())

    products = 1  # of a group's weight gradient, by addmm_
    assert kernels(9) - kernels(2) == 7 * products


def test_sums_of_a_groups_rows_are_those_of_fp32_in_16_bits() -> None:
    rows = torch.randn(512, 6).bfloat16()
    totals = torch.ones(3, 6)
    RowGroups([*accumulate([500, 0, 12])], CPU).add_sums(totals, rows, 0.5)
    exact = torch.stack([rows[:500].double().sum(0), torch.zeros(6).double(), rows[500:].double().sum(0)])
    torch.testing.assert_close(totals.double(), 1 + 0.5 * exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("counts", [[70, 0, 63, 64], [70, 70]], ids=str)
def test_a_cpu_that_is_slow_in_bf16_multiplies_enough_rows_in_fp32(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(sum(counts), 8).bfloat16()
    matrices = torch.randn(len(counts), 8, 6).bfloat16()
    monkeypatch.setattr(import_module("megatron_run_engine.nn.linear"), "_SLOW_IN_BF16", True)
    taken: list[tuple[int, torch.dtype]] = []

    def product(rows: Tensor, matrix: Tensor) -> Tensor:
        taken.append((len(rows), matrix.dtype))
        return rows @ matrix

    monkeypatch.setattr(row_groups, "_has_onednn", lambda _, dtype: dtype == torch.float32)
    monkeypatch.setattr(row_groups, "_onednn_product", product)
    even = len(set(counts)) == 1
    groups = EqualGroups(counts[0], len(rows)) if even else RowGroups([*accumulate(counts)], CPU)
    y = groups.multiply(rows, matrices)
    assert taken == [(count, torch.float32) for count in counts if count >= 64]
    parts = zip(rows.double().split(counts), matrices.double(), strict=True)
    torch.testing.assert_close(y, torch.cat([part @ matrix for part, matrix in parts]).bfloat16(), rtol=8e-3, atol=1e-3)
