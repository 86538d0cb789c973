"""Fits constants of a device to measured trainings: what ranks that share cores cost each other, to small ones.

:func:`fitted` and :func:`least_squares` are those of all the calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, log
from typing import Any, NamedTuple

from megatron_run.config.request import Request
from megatron_run.pipeline.plan import Plan
from megatron_run_planner.devices import Device, MeasuredSum
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.step_time import step_time
from megatron_run_planner.task import Task, read_task

#: What a constant pays for each factor of e away from its microbenchmark: as much as for this error of one training.
_PULL = 0.02
#: The least and largest plausible seconds of latency, bytes a second, and time of an all-to-all over that of a sum.
#: Without them, what few trainings depend on would follow their noise.
_LATENCIES, _RATES, _EXCHANGES = (1e-5, 0.05), (1e8, 1e11), (0.2, 10.0)
#: Ranks that share cores are slowed as by fair turns at least, and at most so many times as much.
_UNFAIR = 3
#: The logarithm by which a constant is moved to see which trainings depend on it: far more than rounding.
_SHIFT = 0.02
#: Steps of the fit at most; it ends earlier, where none of these parts of a step makes it better.
_STEPS, _PARTS = 12, (1.0, 0.5, 0.25, 0.125, 0.0625)
#: The least step of a constant's logarithm: slopes say little of what lies further. Upwards bounds suffice.
_LEAST_STEP = -1.0


def with_anchors(device: Device, anchors: Sequence[Mapping[str, Any]]) -> Device:
    """The costs of ranks to each other inside trainings, by least squares on the logarithms of their errors.

    Microbenchmarks say where to start: in a training ranks also wait to be woken, and their caches are shared. A
    constant that no training depends on stays there.
    """
    for world in sorted({int(each["ranks"]) for each in anchors}):
        measured = [Anchor.read(each) for each in anchors if each["ranks"] == world]
        device = fitted(device, _shared_constants(device, world), measured)
    return device


class Anchor(NamedTuple):
    """A training that was measured: ``seconds`` of a step."""

    task: Task
    plan: Plan
    seconds: float

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Anchor:
        """From a survey."""
        task = read_task(Request.from_json(record["request"]), int(record["ranks"]))
        split = task.split
        plan = Schedules().plan(task.schedule, len(task.model.layers), split.pipeline, split.chunks, split.microbatches)
        return cls(task, plan, float(record["seconds"]))

    def error(self, device: Device) -> float:
        """Logarithm of predicted over measured."""
        return log(step_time(self.task.model, self.task.split, device, self.plan).seconds / self.seconds)


class Constant(NamedTuple):
    """A constant of a device: its value, the least and largest plausible one, and the device with another one."""

    value: float
    low: float
    high: float
    changed: Callable[[Device, float], Device]


def _shared_constants(device: Device, world: int) -> list[Constant]:
    """The costs of so many ranks to each other: slowdowns while two or more compute, sums, messages and exchanges."""
    cores, links = device.cores, device.links
    assert cores is not None, "cores were measured"
    crowded = world > cores.count
    slow = [
        (busy, factor, max(1.0, busy / cores.count))
        for busy, factor in (cores.crowded if crowded else cores.slowdown)
        if 1 < busy <= world
    ]
    found = [
        Constant(factor, least, _UNFAIR * least, partial(_with_slowdown, busy, "crowded" if crowded else "slowdown"))
        for busy, factor, least in slow
    ]
    for each in (each for each in links.sums if each.ranks == world):
        found.append(Constant(each.latency, *_LATENCIES, partial(_with_latency, each[:2])))
        found.append(Constant(each.bandwidth, *_RATES, partial(_with_bandwidth, each[:2])))
    sent = [each for each in links.messages if each.ranks == world]
    found += [Constant(each.latency, *_LATENCIES, partial(_with_message, world)) for each in sent]
    if world == min(each.ranks for each in links.sums):  # one for all worlds, told by the fewest ranks
        found.append(Constant(links.exchange, *_EXCHANGES, _with_exchange))
    return found


def _with_exchange(device: Device, value: float) -> Device:
    return device.model_copy(update={"links": device.links.model_copy(update={"exchange": value})})


def _with_slowdown(busy: int, name: str, device: Device, value: float) -> Device:
    assert device.cores is not None, "cores were measured"
    found, least = [], 1.0
    for ranks, factor in getattr(device.cores, name):
        least = max(least, value if ranks == busy else factor)
        found.append((ranks, least))
    return device.model_copy(update={"cores": device.cores.model_copy(update={name: tuple(found)})})


def _with_latency(key: tuple[int, int], device: Device, value: float) -> Device:
    return _with_sums(device, key, lambda each: each._replace(latency=value))


def _with_bandwidth(key: tuple[int, int], device: Device, value: float) -> Device:
    return _with_sums(device, key, lambda each: each._replace(bandwidth=value))


def _with_sums(device: Device, key: tuple[int, int], change: Callable[[MeasuredSum], MeasuredSum]) -> Device:
    sums = tuple(change(each) if each[:2] == key else each for each in device.links.sums)
    return device.model_copy(update={"links": device.links.model_copy(update={"sums": sums})})


def _with_message(ranks: int, device: Device, value: float) -> Device:
    found = tuple(each._replace(latency=value) if each.ranks == ranks else each for each in device.links.messages)
    return device.model_copy(update={"links": device.links.model_copy(update={"messages": found})})


def fitted(device: Device, constants: Sequence[Constant], anchors: Sequence[Anchor]) -> Device:
    """``device`` with ``constants`` moved so that ``anchors`` are predicted best: Gauss-Newton on the logarithms."""
    start = [log(min(max(each.value, each.low), each.high)) for each in constants]

    def at(point: Sequence[float]) -> Device:
        changed = device
        for constant, value in zip(constants, point, strict=True):
            changed = constant.changed(changed, exp(value))
        return changed

    def errors_at(point: Sequence[float]) -> list[float]:
        changed = at(point)
        return [each.error(changed) for each in anchors]

    def cost(errors: Sequence[float], point: Sequence[float]) -> float:
        pull = sum((_PULL * (one - other)) ** 2 for one, other in zip(point, start, strict=True))
        return sum(each**2 for each in errors) + pull

    def full_step(errors: Sequence[float], point: Sequence[float]) -> list[float]:
        axes = range(len(point))
        moved = [errors_at([value + _SHIFT * (index == axis) for index, value in enumerate(point)]) for axis in axes]
        slopes = [
            [(one - error) / _SHIFT for one in column]
            for column, error in zip(zip(*moved, strict=True), errors, strict=True)
        ]
        rows = [(slope, -error) for slope, error in zip(slopes, errors, strict=True)]
        pulls = [([_PULL * (index == axis) for index in axes], _PULL * (start[axis] - point[axis])) for axis in axes]
        return least_squares([*rows, *pulls], least=_LEAST_STEP)

    point, errors = start, errors_at(start)
    for _ in range(_STEPS):
        step = full_step(errors, point)
        for part in _PARTS:
            trial = [
                min(max(value + part * change, log(each.low)), log(each.high))
                for value, change, each in zip(point, step, constants, strict=True)
            ]
            found = errors_at(trial)
            if cost(found, trial) < cost(errors, point):
                break
        else:
            break
        point, errors = trial, found
    return at(point)


def least_squares(rows: Sequence[tuple[Sequence[float], float]], least: float = 0.0) -> list[float]:
    """The factors, none below ``least``, whose sums come nearest to the targets: coordinate descent on the squares."""
    count = len(rows[0][0])
    found = [0.0] * count
    for _ in range(2000):
        before = list(found)
        for index in range(count):
            top = bottom = 0.0
            for terms, target in rows:
                others = (
                    sum(term * value for term, value in zip(terms, found, strict=True)) - terms[index] * found[index]
                )
                top += terms[index] * (target - others)
                bottom += terms[index] ** 2
            found[index] = max(least, top / bottom) if bottom else 0.0
        if all(abs(one - other) <= 1e-9 * abs(one) for one, other in zip(found, before, strict=True)):
            break
    return found
