"""Collectives that do nothing until they are waited for: on one host gloo is so quick that a missing wait hides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from megatron_run_engine.runtime.comm import Pending

if TYPE_CHECKING:
    from torch import Tensor


class Arrival:
    """In place of a collective's work: ``tensor`` holds no numbers until :meth:`wait` brings ``values``, once."""

    def __init__(self, tensor: Tensor, values: Tensor) -> None:
        self._tensor, self._values = tensor, values
        with torch.no_grad():
            tensor.fill_(torch.nan)

    def wait(self) -> None:
        """Arrive, unless that has happened."""
        with torch.no_grad():
            self._tensor.copy_(self._values)
            self._values = self._tensor


def late(tensor: Tensor, values: Tensor) -> Pending:
    """``values``, which shares no memory with it, on its way into ``tensor``."""
    return Pending(tensor, cast("Any", Arrival(tensor, values)))
