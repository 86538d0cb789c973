"""A loss scale that starts high and halves whenever a gradient overflows, down to 1."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import BuildContext, PluginInfo, Scaler
from megatron_run.hookspecs import hookimpl


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    initial_loss_scale: float = Field(1024.0, ge=1, le=1e30, description="factor by which losses are multiplied first")


class Halving(Scaler):
    def __init__(self, value: float, device: torch.device) -> None:
        self._scale = torch.full((1,), value, dtype=torch.float32, device=device)

    @property
    def scale(self) -> torch.Tensor:
        return self._scale

    def update(self, found_inf: torch.Tensor) -> None:
        self._scale.mul_(torch.where(found_inf > 0, 0.5, 1.0)).clamp_(min=1)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self._scale.item()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._scale.fill_(state["scale"])


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("scaler", "halving", options=Options, provides=frozenset({"train.precision=fp16"}))


@hookimpl
def megatron_run_create_scaler(context: BuildContext, options: Options) -> Scaler:
    return Halving(options.initial_loss_scale, context.device)
