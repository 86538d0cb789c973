"""Scaler ``dynamic``: the loss scale grows while gradients stay finite, and backs off when they overflow.

Dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", 2018) with the hysteresis of Megatron-LM. After
each step, with W the window and H the hysteresis:

- overflow: the growth tracker is reset to 0 and the hysteresis tracker falls by one; at 0 or below, the scale backs off
  to ``max(scale x backoff_factor, min_loss_scale)``;
- clean: the growth tracker rises by one; at W the scale grows to ``scale x growth_factor``, and the trackers are reset
  to 0 and H.

Growth alone refills the hysteresis tracker, neither a clean step nor a backoff, so it may be negative: the first H - 1
overflows after a growth are forgiven, and every later one backs off.

The scale and both trackers live on the device and are written in place: no update waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megatron_run.contracts import PluginInfo, Scaler, scale_notices, scale_text
from megatron_run.errors import DataError
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext


#: Within these bounds a scale and its reciprocal are normal numbers of fp32.
SMALLEST, LARGEST = 1e-30, 1e30


class Options(BaseModel):
    """The options in section ``scaler``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    initial_loss_scale: float = Field(2.0**32, ge=SMALLEST, le=LARGEST, description="first factor on losses")
    min_loss_scale: float = Field(1.0, ge=SMALLEST, le=LARGEST, description="lower bound of the scale")
    loss_scale_window: int = Field(1000, ge=1, description="steps in a row without overflow before the scale grows")
    hysteresis: int = Field(2, ge=1, description="overflows before a backoff, counted since the last growth")
    growth_factor: float = Field(2.0, gt=1, description="factor of a growth")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="factor of a backoff")

    @field_validator("min_loss_scale")
    @classmethod
    def _below_initial(cls, smallest: float, info: ValidationInfo) -> float:
        first = info.data.get("initial_loss_scale", smallest)
        if smallest > first:
            raise ValueError(f"it must be at most scaler.initial_loss_scale, which is {scale_text(first)}")
        return smallest

    def factors(self) -> dict[str, float]:
        """The options that determine scales, by name."""
        return self.model_dump(exclude={"loss_scale_window", "hysteresis"})


class DynamicScaler(Scaler):
    """A scale with the state ``scale``, fp32 [1], and ``growth_tracker`` and ``hysteresis_tracker``, int64 [1]."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self._options = options
        self._scale = torch.full((1,), options.initial_loss_scale, dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros(1, dtype=torch.int64, device=device)
        self._hysteresis_tracker = torch.full((1,), options.hysteresis, dtype=torch.int64, device=device)

    @property
    def scale(self) -> torch.Tensor:
        """The loss scale, fp32 [1]."""
        return self._scale

    def update(self, found_inf: torch.Tensor) -> None:
        """Count an overflow (``found_inf``, fp32 [1], above 0) or a clean step, and move the scale.

        It stops growing at LARGEST, to keep its reciprocal a normal number of fp32. The growth tracker may exceed the
        window, after loading the state of a run with a longer one: it counts as full.
        """
        options, scale = self._options, self._scale
        overflow = found_inf > 0
        self._hysteresis_tracker.sub_(overflow.to(torch.int64))
        backs_off = overflow & (self._hysteresis_tracker <= 0)
        self._growth_tracker.add_(1).masked_fill_(overflow, 0)
        window_full = self._growth_tracker >= options.loss_scale_window
        smaller = (scale * options.backoff_factor).clamp_(min=options.min_loss_scale)
        larger = scale * options.growth_factor
        grown = torch.where(window_full & (larger <= LARGEST), larger, scale)
        scale.copy_(torch.where(backs_off, smaller, grown))
        self._growth_tracker.masked_fill_(window_full, 0)
        self._hysteresis_tracker.masked_fill_(window_full, options.hysteresis)

    def state_dict(self) -> dict[str, float]:
        """``scale``, ``growth_tracker`` and ``hysteresis_tracker``."""
        return {name: tensor.item() for name, tensor in self._state().items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume with the scale and the trackers of ``state``. Raises :class:`DataError` if it does not fit."""
        tensors = self._state()
        if state.keys() != tensors.keys():
            raise DataError(
                f"the state of scaler=dynamic holds {', '.join(state) or 'nothing'}",
                why=f"{', '.join(tensors)} are needed",
                fix="choose the scaler that wrote it",
            )
        if not SMALLEST <= state["scale"] <= LARGEST:
            raise DataError(
                f"the state of scaler=dynamic has the scale {scale_text(state['scale'])}",
                why=f"it must be between {SMALLEST:g} and {LARGEST:g}",
            )
        for name, tensor in tensors.items():
            tensor.fill_(state[name])

    def _state(self) -> dict[str, torch.Tensor]:
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }


def check_config(config: Config, options: Options) -> Iterator[str]:
    """Notices about a scale that the precision does not need, or that rounds gradients."""
    return scale_notices(config, options.factors())


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves fp16."""
    return PluginInfo(
        "scaler",
        "dynamic",
        options=Options,
        provides=frozenset({"train.precision=fp16"}),
        check_config=check_config,
    )


@hookimpl
def megatron_run_create_scaler(context: BuildContext, options: Options) -> Scaler:
    """Make the scaler."""
    return DynamicScaler(options, context.device)
