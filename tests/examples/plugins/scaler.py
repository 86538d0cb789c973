"""A loss scale that is set once and never moves."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import BuildContext, PluginInfo, Scaler
from megatron_run.hookspecs import hookimpl


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    loss_scale: float = Field(1024.0, gt=0, description="factor by which every loss is multiplied")


class Fixed(Scaler):
    def __init__(self, value: float, device: torch.device) -> None:
        self._scale = torch.full((1,), value, device=device)

    @property
    def scale(self) -> torch.Tensor:
        return self._scale

    def update(self, found_inf: torch.Tensor) -> None:
        """Stay: a step with a non-finite gradient is skipped, the scale is the user's."""


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("scaler", "fixed", options=Options)


@hookimpl
def megatron_run_create_scaler(context: BuildContext, options: Options) -> Scaler:
    return Fixed(options.loss_scale, context.device)
