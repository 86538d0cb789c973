"""A GPU that is known, and a clock that computes what it would take."""

from __future__ import annotations

from megatron_run.config.request import Request
from megatron_run_engine.estimate.calibration.gpu_survey import FIRST, STEPS
from megatron_run_planner.accuracy.anchors import Anchor
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.layer_time import Product, product_seconds
from megatron_run_planner.step_time import step_time

#: An H100 of other constants: products of few rows and columns are slow, and so is its host.
_H100 = read_device("h100")
TRUE = _H100.model_copy(
    update={
        "products": _H100.products.model_copy(update={"efficiency": 0.65, "rows": 256.0, "depth": 64.0}),
        "sweeps": _H100.sweeps.model_copy(update={"efficiency": 0.8}),
        "host": _H100.host.model_copy(update={"layer": 4e-3, "kernel": 5e-6}),
    }
)


class StandIn:
    """A clock of the device ``TRUE``, whose products ``alone`` are faster than those of trainings."""

    name, memory, peak = "stand-in", TRUE.memory, TRUE.peak

    def __init__(self, alone: float = 1.0) -> None:
        self._alone = alone

    def product(self, rows: int, columns: int, depth: int) -> float:
        return product_seconds(Product(rows, columns, depth), TRUE) / self._alone

    def sweep(self, size: int) -> float:
        return max(size / (TRUE.bandwidth * TRUE.sweeps.efficiency), TRUE.host.kernel)

    def attention(self, micro_batch: int, heads: int, sequence: int, head_size: int) -> tuple[float, float]:
        flops = 4 * micro_batch * heads * sequence**2 * head_size
        forward = flops / (TRUE.peak * TRUE.products.attention)
        return forward, 2.5 * forward

    def kernel(self) -> float:
        return TRUE.host.kernel

    def training(self, request: Request, steps: int, first: int) -> float:
        assert (steps, first) == (STEPS, FIRST)
        return predicted(request, TRUE)


def predicted(request: Request, device: Device) -> float:
    step = Anchor.read({"request": request.to_json(), "ranks": 1, "seconds": 1.0})
    return step_time(step.task.model, step.task.split, device, step.plan).seconds
