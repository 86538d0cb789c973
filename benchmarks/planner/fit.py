"""Fits the constants of a device description to measured steps, and how a fit is judged on rows that it never saw.

Two stages. Constants first: a damped Gauss-Newton on the logarithms of predicted over measured, with weights that
forgive outliers (Charbonnier), and a pull towards the start. Then, for each layer shape of the dense tables, the ratio
of its measured time to what the constants give.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run_planner.accuracy import Measured
from megatron_run_planner.devices import Device, LayerShape, MeasuredLayer
from megatron_run_planner.layer_time import layer_time
from megatron_run_planner.schedules import spread
from megatron_run_planner.step_time import LayerTimes, estimate
from megatron_run_planner.workload import gpt2_heads

Vector = NDArray[np.float64]

#: Constants that are fitted: their section and name, smallest and largest plausible value, where a fit starts.
FITTED: Mapping[tuple[str, str], tuple[float, float, float]] = {
    ("products", "efficiency"): (0.5, 0.9, 0.7),
    ("products", "rows"): (5, 400, 60),
    ("products", "depth"): (5, 300, 20),
    ("products", "attention"): (0.2, 0.7, 0.5),
    ("products", "wide_efficiency"): (0.2, 0.7, 0.3),
    ("sweeps", "efficiency"): (0.6, 0.92, 0.8),
    ("sweeps", "backward"): (1.2, 2.8, 2),
    ("sweeps", "loss"): (3, 8, 6),
    ("sweeps", "update"): (20, 45, 32),
    ("host", "layer"): (1e-3, 5e-3, 2.5e-3),
    ("host", "softmax"): (2e-4, 2e-3, 1e-3),
    ("host", "head"): (3e-4, 6e-3, 2e-3),
    ("host", "embedding"): (1e-4, 2e-3, 1e-3),
    ("host", "kernel"): (2e-6, 2e-5, 5e-6),
    ("links", "bandwidth"): (150e9, 260e9, 229e9),
    ("links", "latency"): (8e-6, 120e-6, 30e-6),
    ("links", "machine_bandwidth"): (8e9, 13e9, 12e9),
    ("links", "machine_latency"): (5e-6, 5e-4, 50e-6),
}
#: Errors far above this weigh by their size, below it by their square.
KNEE = 0.04
#: Spread of a constant around its start that costs as much as an error of 1%.
PULL = 0.02


class Weighted:
    """Rows of one table, and how much the table weighs as a whole."""

    def __init__(self, rows: Sequence[Measured], weight: float) -> None:
        self.rows, self.weight = rows, weight


def with_constants(device: Device, values: Sequence[float]) -> Device:
    """``device`` with the fitted constants of ``values``, in the order of :data:`FITTED`."""
    fields = device.model_dump()
    for (section, name), value in zip(FITTED, values, strict=True):
        fields[section][name] = value
    return Device.model_validate(fields)


def errors(device: Device, rows: Sequence[Measured]) -> Vector:
    """Logarithms of predicted over measured, by the closed form, which is 1F1B's simulation within 1%."""
    found, layers = [], dict[tuple[object, ...], LayerTimes]()
    for row in rows:
        model, split = row.model, row.split
        key = (
            model.hidden,
            model.layers[0].attentions[0].heads,
            model.sequence,
            split.tensor,
            split.micro_batch,
            split.recompute,
        )
        if key not in layers:
            layers[key] = {kind: layer_time(kind, split, device) for kind in model.kinds.layers}
        places = split.pipeline * split.chunks
        counts = tuple(spread(len(model.layers), places)) if len(model.layers) % places else ()
        layout = looped_layout(LayoutSpec(split.pipeline, split.chunks, len(model.layers), counts))
        found.append(log(estimate(model, split, device, layout, layers[key]) / row.seconds))
    return np.array(found)


def fit_constants(shipped: Device, tables: Sequence[Weighted], rounds: int = 12) -> Device:
    """``shipped`` with the constants that fit ``tables`` best, and without any measured shape."""
    rows = [row for table in tables for row in table.rows]
    weights = np.concatenate([np.full(len(each.rows), each.weight / len(each.rows)) for each in tables])
    device = shipped.model_copy(update={"layers": ()})
    low, high, origin = (np.log([bounds[index] for bounds in FITTED.values()]) for index in range(3))

    def residuals(point: Vector) -> Vector:
        return errors(with_constants(device, [float(value) for value in np.exp(point)]), rows)

    def cost(found: Vector, point: Vector) -> float:
        robust = np.sum(weights * (np.sqrt(found**2 + KNEE**2) - KNEE)) * 2 * KNEE
        return float(robust + np.sum(((point - origin) * PULL) ** 2) / len(FITTED) * 0.01)

    point, damping = origin, 1e-3
    found = residuals(point)
    for _ in range(rounds):
        shift = 1e-3
        columns = [(residuals(point + shift * axis) - found) / shift for axis in np.eye(len(point))]
        jacobian = np.stack(columns, axis=1)
        mass = weights * KNEE / np.sqrt(found**2 + KNEE**2)
        prior = PULL**2 / len(FITTED) * 0.01
        normal = jacobian.T @ (mass[:, None] * jacobian)
        slope = jacobian.T @ (mass * found) + prior * (point - origin)
        for _attempt in range(6):
            scale = damping * np.diag(normal) + prior
            step = np.linalg.solve(normal + np.diag(scale), -slope)
            trial = np.clip(point + np.clip(step, -0.5, 0.5), low, high)
            fresh = residuals(trial)
            if cost(fresh, trial) < cost(found, point):
                point, found, damping = trial, fresh, damping / 3
                break
            damping *= 5
        else:
            break
    return with_constants(device, [float(value) for value in np.exp(point)])


def fit_shapes(device: Device, rows: Sequence[Measured], rounds: int = 8) -> Device:
    """``device`` with the measured ratio of each layer shape that ``rows`` have."""
    groups: defaultdict[LayerShape, list[Measured]] = defaultdict(list)
    for row in rows:
        model, split = row.model, row.split
        heads = gpt2_heads(model.layers[0], fused=device.fused)
        shape = LayerShape(model.hidden, heads, model.sequence, split.tensor, split.micro_batch)
        groups[shape].append(row)
    ratios = dict.fromkeys(groups, 1.0)
    for _ in range(rounds):
        layers = [MeasuredLayer(*shape, ratio) for shape, ratio in ratios.items()]
        device = device.model_copy(update={"layers": tuple(layers)})
        for shape, members in groups.items():
            ratios[shape] *= exp(-float(np.median(errors(device, members))))
    layers = [MeasuredLayer(*shape, round(ratio, 3)) for shape, ratio in sorted(ratios.items())]
    return device.model_copy(update={"layers": tuple(layers)})
