"""From what was measured of one GPU to its description as a device.

Microbenchmarks give the curve of products, the bandwidth of passes, attention and the time of a kernel; trainings of a
few steps then move what these do not show: what the host needs for a layer, and what small kernels and products reach
between others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from megatron_run_planner.accuracy.anchors import Anchor, Constant, fitted
from megatron_run_planner.accuracy.calibrate import fit_products, rounded
from megatron_run_planner.devices import Device, read_device

#: The device whose links are taken: one GPU does not measure them.
_LIKE = "h100"
#: Sections and names of what trainings move, with the least and the largest plausible value.
_SETTLED = (
    ("products", "efficiency", 0.1, 1.0),
    ("sweeps", "efficiency", 0.1, 1.0),
    ("host", "kernel", 5e-7, 2e-5),
    ("host", "layer", 1e-4, 2e-2),
)


@dataclass(frozen=True)
class GpuSurvey:
    """A measurement of one GPU: seconds by its own events, medians, each after its shape.

    ``peak`` are the data sheet's FLOP/s, 0 where they are not known; ``memory`` in bytes. ``products`` are (rows,
    columns, depth, seconds) in bf16; ``sweeps`` (bytes read and written, seconds); ``attention`` (micro batch, heads,
    sequence, head size, forward, backward), causal; ``kernel`` seconds of the shortest kernel. ``trainings`` are
    ``request``, ``ranks`` and ``seconds`` of a step.
    """

    name: str
    memory: float
    peak: float
    products: Sequence[Sequence[float]]
    sweeps: Sequence[Sequence[float]]
    attention: Sequence[Sequence[float]]
    kernel: float
    trainings: Sequence[Mapping[str, Any]]


def describe_gpu(survey: GpuSurvey, name: str, *, kernels: bool = True) -> Device:
    """The device that ``survey`` measured; ``kernels``: with Triton's in its trainings."""
    reached = max(2 * rows * columns * depth / seconds for rows, columns, depth, seconds in survey.products)
    peak = max(survey.peak, reached)
    bandwidth = max(size / seconds for size, seconds in survey.sweeps)
    large = max(size for size, _ in survey.sweeps)
    typical = median(size / seconds for size, seconds in survey.sweeps if size >= large / 16)
    flops = [4 * b * heads * s**2 * size for b, heads, s, size, _, _ in survey.attention]
    # The planner takes a backward as 2.5 forwards: the mean of both is what it reaches.
    attention = [3.5 * one / (each[4] + each[5]) / peak for one, each in zip(flops, survey.attention, strict=True)]
    base = read_device(_LIKE)
    sweeps = {"counted": True, "kernels": kernels, "efficiency": min(1.0, typical / bandwidth)}
    device = base.model_copy(
        update={
            "name": name,
            "memory": survey.memory,
            "peak": peak,
            "bandwidth": bandwidth,
            "products": fit_products(survey.products, peak).model_copy(update={"attention": min(1.0, max(attention))}),
            "sweeps": base.sweeps.model_copy(update=sweeps),
            "host": base.host.model_copy(update={"kernel": survey.kernel}),
        }
    )
    return rounded(settled(device, [Anchor.read(each) for each in survey.trainings]))


def settled(device: Device, trainings: Sequence[Anchor]) -> Device:
    """``device`` with the constants that ``trainings`` of one rank tell better than microbenchmarks."""
    constants = [
        Constant(float(getattr(getattr(device, section), name)), low, high, partial(_with, section, name))
        for section, name, low, high in _SETTLED
    ]
    return fitted(device, constants, trainings) if trainings else device


def _with(section: str, name: str, device: Device, value: float) -> Device:
    return device.model_copy(update={section: getattr(device, section).model_copy(update={name: value})})
