"""The contract of kind ``scaler``: the loss scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Scaler(ABC):
    """Holds the factor by which losses are multiplied so that 16-bit gradients do not vanish.

    The trainer multiplies every loss by ``scale`` where it is produced, and gradients by ``inv_scale`` before the
    update. ``scale`` keeps the same storage for life: a captured graph may hold its address.

    A whole working plugin::

        class Fixed(Scaler):
            def __init__(self, value, device):
                self._scale = torch.full((1,), value, device=device)

            @property
            def scale(self):
                return self._scale

            def update(self, found_inf):
                return None

        @hookimpl
        def megatron_run_create_scaler(context, options):
            return Fixed(options.loss_scale, context.device)
    """

    @property
    @abstractmethod
    def scale(self) -> Tensor:
        """The loss scale, fp32 of shape [1], always at the same address."""

    @property
    def inv_scale(self) -> Tensor:
        """``1 / scale``, the reciprocal taken in float64 and rounded to fp32, shape [1]."""
        return self.scale.double().reciprocal().float()

    @abstractmethod
    def update(self, found_inf: Tensor) -> None:
        """Move the scale after a step. ``found_inf``, fp32 [1], is above 0 when any rank saw a non-finite gradient.

        It is already agreed between the ranks, so an implementation does no communication.
        """
