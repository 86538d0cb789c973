"""Where and how parameters are made: uninitialised, since the kernel fills them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
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


def owned(ids: Tensor, first: int, rows: int, stop: int) -> tuple[Tensor, Tensor]:
    """Where ``ids`` [*] lie among this rank's ``rows`` ids from ``first`` on, and whether they do: both [*].

    An id of another rank lies at some row of this one. Which one differs from id to id, so that what is added there on
    its behalf does not all meet in one place. One outside [0, ``stop``) belongs to nobody and raises RuntimeError: at
    once on the CPU, and on CUDA, without waiting for the device, as the failed assertion of a kernel.
    """
    ids.new_zeros(1).expand(stop).gather(0, ids.flatten())  # an index that is checked on the device, and no memory
    row = ids - first
    return row.remainder(max(rows, 1)), (row >= 0) & (row < rows)
