"""What routers report: their losses, and how evenly tokens are spread over experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from megatron_run_engine.nn.moe.moe_spec import ExpertSpec
    from megatron_run_engine.runtime.metrics import Meter, Metrics

#: As observers see them: the fullest and the emptiest expert's tokens over the mean, and the share that was dropped.
SPREAD = ("model/expert_load_max", "model/expert_load_min", "model/drop_rate")


class RouterReports:
    """Joins what the expert layers of a chunk say in one microbatch.

    ``parts`` tensor-parallel ranks each hold one part of every loss.
    """

    def __init__(self, metrics: Metrics, spec: ExpertSpec, parts: int) -> None:
        self._meters: list[Meter] = [metrics.scalar(name) for name in SPREAD]
        coefficients = {"model/balance_loss": spec.balance, "model/z_loss": spec.z}
        self._weights = {name: coefficients[name] / parts for name in spec.loss_names}

    def count(self, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """Add the spread of tokens, a mean over layers and microbatches, to the step's metrics."""
        if layers:
            total = torch.stack([layer["spread"] for layer in layers]).sum(0)
            for meter, value in zip(self._meters, total, strict=True):
                meter.add(value, len(layers))

    def losses(self, layers: Sequence[Mapping[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
        """Each loss summed over ``layers``, coefficient included, with a weight by which its mean is without one."""
        if not layers:
            return {}
        return {
            name: (
                total := torch.stack([layer[name] for layer in layers]).sum(),
                total.new_full((), len(layers) * weight),
            )
            for name, weight in self._weights.items()
        }
