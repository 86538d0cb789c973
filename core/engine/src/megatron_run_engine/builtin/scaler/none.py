"""Scaler ``none``: losses are not scaled. Right for fp32 and bf16, whose exponent range holds small gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import PluginInfo, Scaler
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from megatron_run_engine.runtime.context import BuildContext


class NoScaler(Scaler):
    """A constant scale of 1. A step with a non-finite gradient is still skipped."""

    def __init__(self, device: torch.device) -> None:
        self._one = torch.ones(1, device=device)

    @property
    def scale(self) -> torch.Tensor:
        """Always 1, fp32 [1]."""
        return self._one

    def update(self, found_inf: torch.Tensor) -> None:
        """Leave the scale as it is."""


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("scaler", "none")


@hookimpl
def megatron_run_create_scaler(context: BuildContext) -> Scaler:
    """Make the scaler."""
    return NoScaler(context.device)
