"""The conformance suite of kind ``scaler``: the loss scale, its updates and its state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isfinite

import torch

from megatron_run.contracts import Scaler
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing import Check, CheckFailed
from megatron_run_testing.build_contexts import current_device, single_process_context

ScalerFactory = Callable[[BuildContext], Scaler]

#: Steps without an overflow in a row: more than the windows after which scales grow, which reach 4000 steps.
_CLEAN = 4200
#: Overflows in a row, as in a run that has diverged: a scale that halves without a floor reaches zero.
_DIVERGED = 1000
#: Steps of the history before which the state is saved, and how many steps the copy is followed: between overflows;
#: within the clean stretch, until any window is full; and after it.
_FOLLOWED = {0: 300, 3: 300, 30: 300, 700: _CLEAN, 2100: _CLEAN, 4300: _CLEAN}


def scaler_checks(factory: ScalerFactory) -> tuple[Check, ...]:
    """The checks of a scaler; ``factory`` creates a new one from a context."""

    def make() -> Scaler:
        return factory(single_process_context(dtype=torch.float32))

    return (
        Check("scale is fp32 of shape [1], positive and finite", lambda: _check_scale(make())),
        Check("inv_scale is the reciprocal taken in float64", lambda: _check_reciprocal(make())),
        Check("scale keeps its storage through updates", lambda: _check_storage(make())),
        Check("equal overflows give equal scales", lambda: _check_deterministic(make(), make())),
        Check("any found_inf above 0 is an overflow and stays unchanged", lambda: _check_found_inf(make(), make())),
        Check("its state is finite numbers, as JSON can hold", lambda: _check_json(make())),
        Check("a scaler that loads its state continues as it does", lambda: _check_resumed(make)),
    )


def overflows(seed: int = 0, steps: int = 200) -> list[torch.Tensor]:
    """A random sequence of found_inf flags, each fp32 [1]: about one step in ten overflows."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(1, generator=generator) < 0.1).float().to(current_device()) for _ in range(steps)]


def long_history() -> list[torch.Tensor]:
    """Flags with a clean stretch, long enough to fill windows of up to 4000 steps, between overflows."""
    return [*overflows(1, 60), *_alike(0.0, _CLEAN), *overflows(2, 100)]


def _alike(flag: float, steps: int) -> list[torch.Tensor]:
    """As many equal flags, each fp32 [1]."""
    return [torch.full((1,), flag, device=current_device()) for _ in range(steps)]


def _check_scale(scaler: Scaler) -> None:
    """Neither a long time without overflows nor one of nothing else may move the scale out of fp32."""
    for step, found_inf in enumerate([*overflows(), *_alike(0.0, _CLEAN), *_alike(1.0, _DIVERGED), *overflows(3, 1)]):
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
    scaler.load_state_dict(_saved(scaler))
    if scaler.scale.data_ptr() != address:
        raise CheckFailed("load_state_dict moved scale to another storage; write into it instead")


def _check_deterministic(first: Scaler, second: Scaler) -> None:
    for step, found_inf in enumerate(overflows()):
        first.update(found_inf)
        second.update(found_inf)
        if not torch.equal(first.scale, second.scale):
            raise CheckFailed(f"step {step}: two scalers with one history have {first.scale} and {second.scale}")


def _check_found_inf(first: Scaler, second: Scaler) -> None:
    for step, found_inf in enumerate(overflows()):
        several = found_inf * (2 + step)
        first.update(found_inf.clone())
        second.update(several)
        if not torch.equal(first.scale, second.scale):
            found = f"{first.scale.item()} after found_inf=1 and {second.scale.item()} after found_inf={2 + step}"
            raise CheckFailed(f"step {step}: scale is {found}")
        if not torch.equal(several, found_inf * (2 + step)):
            raise CheckFailed(f"step {step}: update changed found_inf, which the trainer reads after it")


def _check_json(scaler: Scaler) -> None:
    for step, found_inf in enumerate(overflows()):
        state = scaler.state_dict()
        for name, value in state.items():
            if type(value) not in (int, float) or not isfinite(value):
                raise CheckFailed(f"before step {step}: the state has {name}={value!r}, expected a finite number")
        scaler.update(found_inf)


def _check_resumed(make: Callable[[], Scaler]) -> None:
    """A copy that loads the state at some step of a history must have the original's scales from there on."""
    history, original = long_history(), make()
    copies: dict[int, Scaler] = {}
    for step, found_inf in enumerate(history):
        if step in _FOLLOWED:
            copies[step] = make()
            for _ in range(3):  # give the copy another state, which loading must replace completely
                copies[step].update(torch.ones(1, device=current_device()))
            copies[step].load_state_dict(_saved(original))
        copies = {saved: copy for saved, copy in copies.items() if step < saved + _FOLLOWED[saved]}
        for saved, copy in copies.items():
            if not torch.equal(copy.scale, original.scale):
                found = f"{copy.scale.item()}, and {original.scale.item()} without the interruption"
                raise CheckFailed(f"saved before step {saved}: before step {step} scale is {found}")
            copy.update(found_inf)
        original.update(found_inf)


def _saved(scaler: Scaler) -> Mapping[str, float]:
    """The scaler's state, converted to JSON and back."""
    state: Mapping[str, float] = json.loads(json.dumps(dict(scaler.state_dict())))
    return state
