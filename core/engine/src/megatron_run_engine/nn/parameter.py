"""Where and how parameters are made: uninitialised, since the kernel fills them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from megatron_run_engine.runtime.context import BuildContext


def build_device(context: BuildContext) -> torch.device:
    """The meta device inside ``with torch.device("meta")``, which plans without memory; else the context's."""
    default = torch.get_default_device()
    return default if default.type == "meta" else context.device


def empty_parameter(context: BuildContext, *shape: int) -> Parameter:
    """An uninitialised parameter in the parameter dtype, where the model is being built."""
    return Parameter(torch.empty(shape, dtype=context.dtypes.param, device=build_device(context)))
