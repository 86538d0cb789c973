"""The losses that a model's chunks report, as meters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from megatron_run.contracts import Model
    from megatron_run.metrics import Meter, Metrics

#: The loss that a run is judged by: every model reports it.
LANGUAGE_MODEL = "lm"


def make_meters(model: Model, metrics: Metrics) -> dict[str, Meter]:
    """A meter for each name that ``model`` declares; ``lm`` must be one. Raises :class:`PluginError`."""
    if LANGUAGE_MODEL not in model.metric_names:
        raise PluginError(
            f"the model declares the losses {', '.join(model.metric_names) or 'none'}",
            why=f"the one that a run is judged by is {LANGUAGE_MODEL!r}",
            fix=f"add {LANGUAGE_MODEL!r} to Model.metric_names",
        )
    return {name: metrics.scalar(name) for name in model.metric_names}


def report_loss(meters: Mapping[str, Meter], name: str, total: Tensor, weight: Tensor) -> None:
    """Add a chunk's loss, a sum and its weight. Raises :class:`PluginError` for a name that was not declared."""
    if name not in meters:
        raise PluginError(f"a chunk reports the loss {name!r}", fix="add it to Model.metric_names")
    meters[name].add(total, weight)
