"""Creates parameters: uninitialised, since ``runtime.parameter_init`` fills them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from megatron_run_engine.runtime.context import BuildContext


def build_device(context: BuildContext) -> torch.device:
    """Return the meta device within ``with torch.device("meta")``, for planning without memory, else the context's."""
    default = torch.get_default_device()
    return default if default.type == "meta" else context.device


def empty_parameter(context: BuildContext, *shape: int) -> Parameter:
    """Return an uninitialised parameter in the parameter dtype, on the build device."""
    return Parameter(torch.empty(shape, dtype=context.dtypes.param, device=build_device(context)))


def owned(ids: Tensor, first: int, rows: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return the row of each of ``ids`` [*] among this rank's ``rows`` from ``first`` on, and whether it has one.

    An id outside [0, ``stop``) raises RuntimeError: at once on the CPU, on CUDA as a failed assertion of a kernel.
    """
    # A gather from an expanded scalar takes no memory, and checks every index on the device without waiting for it.
    ids.new_zeros(1).expand(stop).gather(0, ids.flatten())
    row = ids - first
    # Ids of other ranks get a row too, a different one for each id: the zeros that a backward adds for them would
    # otherwise all contend for one row.
    return row.remainder(max(rows, 1)), (row >= 0) & (row < rows)
