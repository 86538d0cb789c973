"""Groups whose sizes stay on the device: the bits of groups that the host knows, and nothing that the host reads."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.capture import BrokenRule, Rules
from megatron_run_engine.nn import TransformerSpec, device_groups
from megatron_run_engine.nn.device_groups import DeviceGroups, takes_counts
from megatron_run_engine.nn.grouped import grouped_linear
from megatron_run_engine.nn.mlp import Experts
from megatron_run_engine.nn.row_groups import RowGroups
from megatron_run_engine.runtime.gradients import GradientAccumulator, main_grad
from megatron_run_testing.build_contexts import single_process_context

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
#: Some without rows, one row alone, none at all.
COUNTS = ([3, 0, 5, 1], [0, 0, 1, 0], [9, 0, 0, 0], [0, 0, 0, 0])
INPUTS, OUTPUTS = 16, 8


def operands(counts: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, one matrix a group, and gradients of the products."""
    generator = torch.Generator().manual_seed(sum(counts))
    sizes = (sum(counts), INPUTS), (len(counts), INPUTS, OUTPUTS), (sum(counts), OUTPUTS)
    rows, matrices, grad = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return rows, matrices, grad


def by_group(counts: list[int], rows: Tensor, matrices: Tensor) -> Tensor:
    parts = zip(rows.double().split(counts), matrices.double(), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


def gradients_by_group(counts: list[int], left: Tensor, right: Tensor) -> Tensor:
    parts = zip(left.double().split(counts), right.double().split(counts), strict=True)
    return torch.stack([one.T @ other for one, other in parts])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_cpu_leaves_the_bits_of_groups_that_the_host_knows(counts: list[int], dtype: torch.dtype) -> None:
    rows, matrices, grad = operands(counts, dtype)
    known, groups = RowGroups([*accumulate(counts)], CPU), DeviceGroups(torch.tensor(counts), sum(counts))
    assert torch.equal(groups.multiply(rows, matrices), known.multiply(rows, matrices))
    assert torch.equal(groups.of_rows, known.of_rows)
    wide = torch.promote_types(dtype, torch.float32)
    sums, other = (torch.ones(len(counts), INPUTS, OUTPUTS, dtype=wide) for _ in range(2))
    groups.add_products(sums, rows, grad)
    known.add_products(other, rows, grad)
    assert torch.equal(sums, other)


@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_neither_forward_nor_backward_reads_a_count_on_the_host(split: bool) -> None:
    """The rules of a graph, under which every read is refused."""
    counts = torch.tensor([2, 0, 3])
    weight, bias = Parameter(torch.randn(3 * OUTPUTS, INPUTS)), Parameter(torch.randn(3 * OUTPUTS))
    for each in (weight, bias):
        each.main_grad = torch.zeros_like(each)  # type: ignore[attr-defined]  # as a bucket does
    rows, gradients = torch.randn(5, INPUTS, requires_grad=True), GradientAccumulator()
    with Rules([]), gradients.deferring((0, 0)):
        y = grouped_linear(rows, weight, bias, counts, gradients)
        torch.autograd.backward(y, torch.ones_like(y))
    with Rules([]):
        gradients.run_deferred((0, 0))
    with pytest.raises(BrokenRule, match="reads a tensor on the host"), Rules([]):
        RowGroups(counts.cumsum(0).tolist(), CPU)
    if not split:
        with Rules([]):
            torch.autograd.backward(grouped_linear(rows, weight, bias, counts, gradients).sum())


def test_a_meta_tensor_has_the_shape_of_the_product() -> None:
    rows, matrices = torch.zeros(5, INPUTS, device="meta"), torch.zeros(3, INPUTS, OUTPUTS, device="meta")
    assert DeviceGroups(torch.zeros(3, dtype=torch.int64, device="meta"), 5).multiply(rows, matrices).shape == (5, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_product_of_cuda_is_that_of_each_group(counts: list[int], dtype: torch.dtype) -> None:
    """torch has the same call on a CPU; a gradient that is one value everywhere comes with strides of 0."""
    rows, matrices, _ = operands(counts, dtype)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    for given in (rows, torch.ones((), dtype=dtype).expand(rows.shape)):
        found = device_groups._multiply_on_cuda(given, matrices, ends)
        exact = by_group(counts, given, matrices)
        torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "features", "generation", "taken"),
    [
        (CPU, torch.float64, (5, 7), 0, True),
        (CUDA, torch.bfloat16, (16, 8), 9, True),
        (CUDA, torch.bfloat16, (16, 8), 10, True),
        (CUDA, torch.bfloat16, (16, 8), 8, False),
        (CUDA, torch.bfloat16, (16, 12), 9, False),
        (CUDA, torch.float32, (16, 8), 9, False),
    ],
    ids=str,
)
def test_counts_stay_on_a_device_whose_products_read_them_there(
    device: torch.device,
    dtype: torch.dtype,
    features: tuple[int, ...],
    generation: int,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _place_gpu(monkeypatch, generation)
    assert takes_counts(device, dtype, features) is taken
    device_groups._generation.cache_clear()


def _place_gpu(monkeypatch: pytest.MonkeyPatch, generation: int) -> None:
    """CUDA has started, on a GPU of a ``generation``."""
    monkeypatch.setattr(device_groups, "triton_runs", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))
    device_groups._generation.cache_clear()


def test_a_process_that_has_planned_asks_the_gpu_that_it_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_groups, "triton_runs", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert takes_counts(CUDA, torch.bfloat16, (16, 8))
    _place_gpu(monkeypatch, 8)
    assert not takes_counts(CUDA, torch.bfloat16, (16, 8))
    assert not takes_counts(torch.device("cuda", 0), torch.bfloat16, (16, 8))
    device_groups._generation.cache_clear()


def test_without_triton_no_counts_stay_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight gradients are a kernel of Triton's."""
    _place_gpu(monkeypatch, 9)
    monkeypatch.setattr(device_groups, "triton_runs", lambda: False)
    assert not takes_counts(CUDA, torch.bfloat16, (16, 8))
    device_groups._generation.cache_clear()


def test_gradients_are_added_to_their_parameters() -> None:
    counts = [2, 0, 3]
    weight = Parameter(torch.randn(3 * OUTPUTS, INPUTS, dtype=torch.float64))
    weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]  # as a bucket does
    rows = torch.randn(5, INPUTS, dtype=torch.float64, requires_grad=True)
    y = grouped_linear(rows, weight, None, torch.tensor(counts), GradientAccumulator())
    grad = torch.randn_like(y)
    torch.autograd.backward(y, grad)
    expected = 1 + gradients_by_group(counts, grad, rows.detach())
    torch.testing.assert_close(main_grad(weight).view(3, OUTPUTS, INPUTS), expected)


def test_experts_take_counts_on_the_device_where_both_layers_declare_it() -> None:
    """A layer of another factory that merely has the attribute has promised nothing."""
    spec = TransformerSpec(layers=1, hidden=16, heads=2, kv_heads=2, ffn=8, vocab=31, sequence_length=8, dropout=0.0)
    context = single_process_context()
    experts = Experts(DenseLayers(context), spec, range(2), 8)
    assert experts.takes_device_counts
    experts.output = torch.nn.Identity()
    experts.output.takes_device_counts = True  # type: ignore[assignment]  # nn.Module's attributes are tensors
    assert not experts.takes_device_counts
