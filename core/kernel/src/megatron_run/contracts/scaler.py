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
    """Holds the loss scale, which keeps small 16-bit gradients from underflowing to zero.

    The trainer multiplies every loss by ``scale`` before its backward, and the gradients by ``inv_scale`` before the
    update. ``scale`` keeps the same storage for life, because a captured graph may hold its address. A scaler whose
    scale changes has a state, from which a resumed run continues.

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

    ``provides`` declares that the plugin serves fp16, which cannot be trained without a loss scale.
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
        """Update the scale after a step. ``found_inf``, fp32 [1], is above 0 if any rank had a non-finite gradient.

        ``found_inf`` is equal on all ranks already, so an implementation needs no communication to keep the scales
        equal. It must not be modified. Avoid reading it on the host, which would wait for the device.
        """

    def state_dict(self) -> Mapping[str, float]:
        """The state on which later updates depend, by name: finite numbers, as JSON can hold them.

        It is called when a checkpoint is written, and may read the device. It is equal on all ranks. The default is
        empty, for a scale that never changes.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from ``state``, a result of the same plugin's :meth:`state_dict`: equal updates give equal scales.

        The scale is written in place. Anything that the state does not hold, such as bounds and factors, comes from
        this run's options. If ``state`` does not fit, raise :class:`megatron_run.errors.DataError` and change nothing.

        It is not called if a checkpoint has no scaler state; the run then warns and starts from its options.
        """
        if state:
            raise DataError(
                f"{type(self).__name__} has no state, but the checkpoint holds {', '.join(state)}",
                fix="choose the scaler that wrote it",
            )


def scale_text(scale: float) -> str:
    """A loss scale with all its digits, so that a power of two can be recognised: ``4294967296``, ``0.5``."""
    return f"{scale:.0f}" if float(scale).is_integer() else str(float(scale))


def scale_notices(config: Config, numbers: Mapping[str, float]) -> Iterator[str]:
    """Notices for the user of a loss scale, for ``PluginInfo.check_config``.

    ``numbers`` are the options that determine the scale, by name. Scaling by a power of two is exact, since it changes
    exponents only; any other factor rounds when it is applied, and again when it is undone.
    """
    precision = config.train.precision
    if precision != "fp16":
        needless = f"scaler={config.scaler.use} is not needed"
        yield f"{needless}: gradients of train.precision={precision} do not vanish as those of fp16 do"
    for name, number in numbers.items():
        if frexp(number)[0] != 0.5:
            yield f"scaler.{name}={scale_text(number)} is not a power of two: scaling by it rounds gradients"
