"""The conformance suite of kind ``scaler``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_run.contracts import BuildContext, Scaler
from megatron_run.testing.check import Check, CheckFailed
from megatron_run.testing.context import single_process_context

ScalerFactory = Callable[[BuildContext], Scaler]


def scaler_checks(factory: ScalerFactory) -> tuple[Check, ...]:
    """The checks of a scaler; ``factory`` makes a fresh one from a context."""

    def make() -> Scaler:
        return factory(single_process_context(dtype=torch.float32))

    return (
        Check("scale is fp32 of shape [1], positive and finite", lambda: _check_scale(make())),
        Check("inv_scale is the reciprocal taken in float64", lambda: _check_reciprocal(make())),
        Check("scale keeps its storage through updates", lambda: _check_storage(make())),
        Check("the same overflows give the same scales", lambda: _check_deterministic(make(), make())),
    )


def overflows(seed: int = 0, steps: int = 200) -> list[torch.Tensor]:
    """A random sequence of found_inf flags, each fp32 [1]: about one step in ten overflows."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(1, generator=generator) < 0.1).float() for _ in range(steps)]


def _check_scale(scaler: Scaler) -> None:
    for step, found_inf in enumerate(overflows()):
        scale = scaler.scale
        if scale.dtype != torch.float32 or tuple(scale.shape) != (1,):
            raise CheckFailed(f"before step {step}: scale is {scale.dtype} {tuple(scale.shape)}, expected fp32 (1,)")
        if not (torch.isfinite(scale) & (scale > 0)).item():
            raise CheckFailed(f"before step {step}: scale is {scale.item()}, expected a positive finite number")
        scaler.update(found_inf)


def _check_reciprocal(scaler: Scaler) -> None:
    for step, found_inf in enumerate(overflows()):
        expected = scaler.scale.double().reciprocal().float()
        if not torch.equal(scaler.inv_scale, expected):
            found = scaler.inv_scale.item()
            raise CheckFailed(f"before step {step}: inv_scale is {found!r}, 1 / scale is {expected.item()!r}")
        scaler.update(found_inf)


def _check_storage(scaler: Scaler) -> None:
    address = scaler.scale.data_ptr()
    for step, found_inf in enumerate(overflows()):
        scaler.update(found_inf)
        if scaler.scale.data_ptr() != address:
            raise CheckFailed(f"step {step}: scale moved to another storage; write into it instead")


def _check_deterministic(first: Scaler, second: Scaler) -> None:
    for step, found_inf in enumerate(overflows()):
        first.update(found_inf)
        second.update(found_inf)
        if not torch.equal(first.scale, second.scale):
            raise CheckFailed(f"step {step}: two scalers with one history have {first.scale} and {second.scale}")
