"""Products of groups whose sizes stay on a GPU: those of each group, and no wait of the host for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn import Parameter

from megatron_run_engine.nn.device_groups import takes_counts
from megatron_run_engine.nn.grouped import grouped_linear
from megatron_run_engine.runtime.gradients import GradientAccumulator, main_grad

INPUTS, OUTPUTS = 264, 136


@contextmanager
def no_wait() -> Iterator[None]:
    """Refuse what lets the host wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("counts", [[300, 0, 5, 1], [0, 0, 1, 0], [512, 0, 0, 0]], ids=str)
def test_forward_and_backward_wait_for_no_count(counts: list[int]) -> None:
    device, groups = torch.device("cuda", 0), len(counts)
    if not takes_counts(device, torch.bfloat16, (INPUTS, OUTPUTS)):
        pytest.skip("products read counts on the device from compute capability 9.0 on")
    weight, bias = (
        Parameter(torch.randn(size, device=device, dtype=torch.bfloat16))
        for size in ((groups * OUTPUTS, INPUTS), (groups * OUTPUTS,))
    )
    for each in (weight, bias):
        each.main_grad = torch.ones_like(each, dtype=torch.float32)  # type: ignore[attr-defined]  # as a bucket does
    rows = torch.randn(sum(counts), INPUTS, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad, on_device = torch.randn(sum(counts), OUTPUTS, device=device).bfloat16(), torch.tensor(counts, device=device)
    grouped_linear(rows, weight, bias, on_device, GradientAccumulator())  # the library starts
    with no_wait():
        y = grouped_linear(rows, weight, bias, on_device, GradientAccumulator())
        torch.autograd.backward(y, grad)
    matrices, shifts = weight.detach().double().view(groups, OUTPUTS, INPUTS), bias.detach().double().view(groups, -1)
    parts, grads = rows.detach().double().split(counts), grad.double().split(counts)
    exact = torch.cat([part @ matrix.T + shift for part, matrix, shift in zip(parts, matrices, shifts, strict=True)])
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-1)
    of_weight = 1 + torch.stack([one.T @ part for one, part in zip(grads, parts, strict=True)])
    torch.testing.assert_close(main_grad(weight).double().view(of_weight.shape), of_weight, rtol=1e-4, atol=1e-3)
    of_bias = 1 + torch.stack([one.sum(0) for one in grads])
    torch.testing.assert_close(main_grad(bias).double().view(of_bias.shape), of_bias, rtol=1e-4, atol=1e-3)
    assert rows.grad is not None
    of_rows = torch.cat([one @ matrix for one, matrix in zip(grads, matrices, strict=True)])
    torch.testing.assert_close(rows.grad.double(), of_rows, rtol=2e-2, atol=2e-1)
