"""The contract of kind ``scaler``: the loss scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import frexp
from typing import TYPE_CHECKING

from megatron_run.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts.schema import Config


class Scaler(ABC):
    """Holds the factor by which losses are multiplied so that 16-bit gradients do not vanish.

    The trainer multiplies every loss by ``scale`` where it is produced, and gradients by ``inv_scale`` before the
    update. ``scale`` keeps the same storage for life: a captured graph may hold its address. A scaler whose scale moves
    has a state, which a run that goes on from a checkpoint needs to move on from there.

    A whole working plugin, which halves the scale at every overflow::

        class Halving(Scaler):
            def __init__(self, value, device):
                self._scale = torch.full((1,), value, dtype=torch.float32, device=device)

            @property
            def scale(self):
                return self._scale

            def update(self, found_inf):
                self._scale.mul_(torch.where(found_inf > 0, 0.5, 1.0)).clamp_(min=1)

            def state_dict(self):
                return {"scale": self._scale.item()}

            def load_state_dict(self, state):
                self._scale.fill_(state["scale"])

        @hookimpl
        def megatron_run_plugin_info():
            return PluginInfo("scaler", "halving", provides=frozenset({"train.precision=fp16"}), options=Options)

        @hookimpl
        def megatron_run_create_scaler(context, options):
            return Halving(options.initial_loss_scale, context.device)

    ``provides`` says that fp16 can be trained with it: without a scale its gradients vanish.
    """

    @property
    @abstractmethod
    def scale(self) -> Tensor:
        """The loss scale, fp32 of shape [1], positive and finite, always at the same address."""

    @property
    def inv_scale(self) -> Tensor:
        """``1 / scale``, the reciprocal taken in float64 and rounded to fp32, shape [1]."""
        return self.scale.double().reciprocal().float()

    @abstractmethod
    def update(self, found_inf: Tensor) -> None:
        """Move the scale after a step. ``found_inf``, fp32 [1], is above 0 when any rank saw a non-finite gradient.

        It is already agreed between the ranks, so an implementation does no communication, and every rank's scale stays
        the same. It must not be written to. Reading it on the host would make the host wait for the device.
        """

    def state_dict(self) -> Mapping[str, float]:
        """What the next updates depend on, by name: whole numbers and finite ones, as JSON has them.

        It is asked for when a checkpoint is written, and may read the device. Every rank's is the same. Empty, as it is
        by default, when the scale never moves.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from ``state``, which :meth:`state_dict` of the same plugin gave: equal updates give equal scales.

        The scale is written in place. What the state does not hold, as bounds and factors, is what this run's options
        say. May raise :class:`megatron_run.errors.DataError`, having changed nothing, when ``state`` does not fit.

        It is not called when a checkpoint has no state of a scaler: the run then warns, and starts from its options.
        """
        if state:
            raise DataError(
                f"{type(self).__name__} has no state, and is given {', '.join(state)}",
                fix="choose the scaler that wrote it",
            )


def scale_text(scale: float) -> str:
    """A loss scale for people, with all its digits, by which one knows a power of two: ``4294967296``, ``0.5``."""
    return f"{scale:.0f}" if float(scale).is_integer() else str(float(scale))


def scale_notices(config: Config, numbers: Mapping[str, float]) -> Iterator[str]:
    """What the user of a loss scale should know, for ``PluginInfo.check_config``.

    ``numbers`` are the options from which the scale is made, by name. A power of two only moves exponents: any other
    number rounds what is scaled by it, and rounds it again where that is undone.
    """
    precision = config.train.precision
    if precision != "fp16":
        needless = f"scaler={config.scaler.use} is not needed"
        yield f"{needless}: gradients of train.precision={precision} do not vanish as those of fp16 do"
    for name, number in numbers.items():
        if frexp(number)[0] != 0.5:
            yield f"scaler.{name}={scale_text(number)} is not a power of two: scaling by it rounds gradients"
