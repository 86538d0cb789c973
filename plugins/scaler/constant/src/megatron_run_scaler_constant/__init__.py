"""Scaler ``constant``: one loss scale for the whole run.

A step whose gradients overflow is skipped and the scale stays, as with Megatron-LM's ``--loss-scale``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import PluginInfo, Scaler, scale_notices
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext


class Options(BaseModel):
    """The options in section ``scaler``. The bounds keep the scale's reciprocal a normal number of fp32."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    loss_scale: float = Field(ge=1e-30, le=1e30, description="factor on losses; a power of two is exact")


class ConstantScaler(Scaler):
    """A scale that never moves, and so has no state."""

    def __init__(self, loss_scale: float, device: torch.device) -> None:
        self._scale = torch.full((1,), loss_scale, dtype=torch.float32, device=device)

    @property
    def scale(self) -> torch.Tensor:
        """The loss scale, fp32 [1]."""
        return self._scale

    def update(self, found_inf: torch.Tensor) -> None:
        """Keep the scale, whatever ``found_inf`` (fp32 [1]) is."""


def check_config(config: Config, options: Options) -> Iterator[str]:
    """Notices about a scale that the precision does not need, or that rounds gradients."""
    return scale_notices(config, options.model_dump())


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves fp16."""
    return PluginInfo(
        "scaler",
        "constant",
        options=Options,
        provides=frozenset({"train.precision=fp16"}),
        check_config=check_config,
    )


@hookimpl
def megatron_run_create_scaler(context: BuildContext, options: Options) -> Scaler:
    """Make the scaler."""
    return ConstantScaler(options.loss_scale, context.device)
