"""Creation of parameters, uninitialised: the engine fills each from its name (``runtime/parameter_init.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run_engine.runtime.parameter_init import take_memory

if TYPE_CHECKING:
    from megatron_run.contracts import BuildContext


def build_device(context: BuildContext) -> torch.device:
    """The meta device inside ``with torch.device("meta")``, for plans that need no memory; else the context's."""
    default = torch.get_default_device()
    return default if default.type == "meta" else context.device


def empty_parameter(context: BuildContext, *shape: int) -> Parameter:
    """An uninitialised parameter in the parameter type, on the device where the model is being built.

    Where the optimizer lends memory it has none: no rank ever holds the whole model.
    """
    made = Parameter(torch.empty(shape, dtype=context.dtypes.param, device=build_device(context)))
    if context.lends:
        take_memory(made)
    return made


def owned(ids: Tensor, first: int, rows: int, stop: int) -> tuple[Tensor, Tensor]:
    """The local row of each of ``ids`` [*], and whether this rank holds it: rows ``first`` to ``first + rows - 1``.

    Both results are [*]. An id of another rank still maps to a valid local row, whose values the caller masks. The
    remainder spreads such ids over all rows: were it always row 0, the zeros added there in the backward would all
    contend for one row. An id outside [0, ``stop``) raises RuntimeError: at once on the CPU, and on CUDA as a device
    assertion, without a synchronisation here.
    """
    ids.new_zeros(1).expand(stop).gather(0, ids.flatten())  # a bounds check on the device, without memory for `stop`
    row = ids - first
    return row.remainder(max(rows, 1)), (row >= 0) & (row < rows)
