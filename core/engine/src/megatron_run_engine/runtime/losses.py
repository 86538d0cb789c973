"""The losses that a model's chunks report: summed by name, and kept by microbatch until the step ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megatron_run.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Model
    from megatron_run_engine.runtime.metrics import Metrics

#: The loss by which a run is judged. Every model reports it.
LANGUAGE_MODEL = "lm"


class Reported(NamedTuple):
    """The sum of a loss over the tokens of one microbatch."""

    microbatch: int
    name: str
    total: Tensor


class Losses:
    """One meter for each name in ``model.metric_names``. Raises :class:`PluginError` unless ``lm`` is among them.

    ``reported`` lists what this rank has reported since :meth:`start_step`, in order.
    """

    def __init__(self, model: Model, metrics: Metrics) -> None:
        if LANGUAGE_MODEL not in model.metric_names:
            raise PluginError(
                f"the model declares the losses {', '.join(model.metric_names) or 'none'}",
                why=f"the one that a run is judged by is {LANGUAGE_MODEL!r}",
                fix=f"add {LANGUAGE_MODEL!r} to Model.metric_names",
            )
        self._meters = {name: metrics.scalar(name) for name in model.metric_names}
        self.reported: list[Reported] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all losses."""
        return tuple(self._meters)

    def start_step(self) -> None:
        """Clear ``reported``."""
        self.reported.clear()

    def report(self, microbatch: int, name: str, total: Tensor, weight: Tensor) -> None:
        """Add a chunk's loss: its sum and weight. Raises :class:`PluginError` for an undeclared name."""
        if name not in self._meters:
            raise PluginError(f"a chunk reports the loss {name!r}", fix="add it to Model.metric_names")
        self._meters[name].add(total, weight)
        # Clone: if the chunk was replayed from a graph, the next replay overwrites ``total``.
        self.reported.append(Reported(microbatch, name, total.clone()))
