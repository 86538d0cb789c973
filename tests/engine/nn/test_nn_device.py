"""A fake tensor that stands for a GPU's goes a GPU's ways: its kernels, and what they keep."""

from __future__ import annotations

import ast

import torch

from megatron_run_engine.estimate.step_memory import LiveBytes
from megatron_run_engine.nn.attention import CoreAttention, matmuls_are_faster
from megatron_run_engine.nn.device import PlannedMode, device_type, on_cpu, on_gpu
from megatron_run_engine.nn.dropout import Dropout
from megatron_run_engine.nn.fused import fuses
from megatron_run_engine.nn.linear import can_widen, widening_pays
from tests.support.checkout import ENGINE

BF16 = torch.bfloat16


def test_a_tensor_is_where_it_is_and_a_planned_one_where_it_will_be() -> None:
    x = torch.ones(64, 2, 4, 16, dtype=BF16)
    assert (device_type(x), on_cpu(x), on_gpu(x)) == ("cpu", True, False)
    assert device_type(x.to("meta")) == "meta"
    for gpu in (False, True):
        with PlannedMode(gpu=gpu):
            planned = torch.ones(64, 2, 4, 16, dtype=BF16)
            assert (on_gpu(planned), on_cpu(planned)) == (gpu, not gpu)
            assert matmuls_are_faster(planned, 0.0) is not gpu
            assert fuses(planned) is gpu
            assert not (gpu and widening_pays(planned.flatten(1)))
            if gpu:
                assert can_widen(planned, torch.float32)
                assert not can_widen(planned, torch.float64)


def kept(work: torch.nn.Module, *shape: int, count: int = 1) -> int:
    """Bytes beside ``count`` inputs and the result that a planned GPU keeps of ``work`` for its backward."""
    with PlannedMode(gpu=True):
        inputs = [torch.empty(shape, dtype=BF16, requires_grad=True) for _ in range(count)]
        live = LiveBytes()
        with live:
            result: torch.Tensor = work(*inputs)
            return live.now - result.untyped_storage().nbytes()


def test_a_dropout_keeps_a_byte_a_value() -> None:
    assert kept(Dropout(0.1), 64, 2, 16) == 64 * 2 * 16


def test_attention_keeps_a_number_a_query_and_no_scores_whatever_its_dropout() -> None:
    assert kept(CoreAttention(0.1), 256, 2, 4, 16, count=3) == kept(CoreAttention(0.0), 256, 2, 4, 16, count=3)
    assert kept(CoreAttention(0.1), 256, 2, 4, 16, count=3) <= 4 * 256 * 2 * 4


def test_layers_ask_in_one_place_where_a_tensor_is() -> None:
    """Whoever reads a tensor's device itself takes a CPU's way where a GPU is planned for."""
    folder = next(iter(ENGINE.folder.rglob("megatron_run_engine/nn")))
    found = [
        f"{file.relative_to(folder)}:{node.lineno}"
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and (node.attr in ("is_cuda", "is_cpu") or ast.unparse(node).endswith(".device.type"))
    ]
    assert [each for each in found if not each.startswith("device.py:")] == []
