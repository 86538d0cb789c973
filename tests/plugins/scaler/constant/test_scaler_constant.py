from __future__ import annotations

import pytest
import torch

from megatron_run.contracts import Scaler
from megatron_run.errors import DataError
from megatron_run_scaler_constant import Options, megatron_run_create_scaler
from megatron_run_testing.build_contexts import single_process_context


def made(loss_scale: float) -> Scaler:
    return megatron_run_create_scaler(single_process_context(), Options(loss_scale=loss_scale))


def test_it_is_the_users_number_for_good() -> None:
    scaler = made(4096)
    for found_inf in (0.0, 1.0, 1.0):
        scaler.update(torch.tensor([found_inf]))
        assert (scaler.scale.item(), scaler.inv_scale.item()) == (4096.0, 2.0**-12)


def test_it_is_fp32_whatever_torch_makes_by_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert made(2).scale.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_has_no_state_and_takes_none() -> None:
    scaler = made(2)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    with pytest.raises(DataError) as caught:
        scaler.load_state_dict({"scale": 8.0, "growth_tracker": 3})
    assert str(caught.value) == (
        "ConstantScaler has no state, but the checkpoint holds scale, growth_tracker; choose the scaler that wrote it"
    )
