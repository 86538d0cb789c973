"""Seconds of the messages of weights: a step's reduction of gradients, and what ``optimizer=zero3`` sends of a *unit*.

It is gathered before its segment runs, and again for its backward, after which its gradients are reduced and scattered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_run_planner.devices import Device
from megatron_run_planner.devices.transfers import as_work, sum_over
from megatron_run_planner.memory.lent import Unit
from megatron_run_planner.workload import ModelSplit


def summed(units: Iterable[Unit], split: ModelSplit, device: Device, width: float) -> float:
    """Seconds in which the replicas of each of ``units`` sum ``width`` bytes a weight, one unit after the other."""
    copies, stride = split.replicas // split.expert, split.expert_stride(device.links.machine)
    seconds = 0.0
    for unit in units:
        if unit.dense:
            seconds += sum_over(device, split, width * unit.dense, split.replicas, split.tensor)
        if unit.experts:
            seconds += sum_over(device, split, width * unit.experts, copies, stride)
    return seconds


def _gathered(units: Iterable[Unit], split: ModelSplit, device: Device) -> float:
    """Seconds to gather the weights of each of ``units``: half a sum."""
    return summed(units, split, device, device.width / 2)


def _scattered(units: Iterable[Unit], split: ModelSplit, device: Device) -> float:
    """Seconds to reduce and scatter their gradients: half a sum; a whole one by gloo, for which sums were measured."""
    whole = device.links.sums and split.replicas > 2
    return summed(units, split, device, split.gradient_bytes / (1 if whole else 2))


def each_microbatch(units: Sequence[Unit], split: ModelSplit, device: Device, turn: int = 0) -> tuple[float, float]:
    """Seconds of the messages of ``units`` in a forward and in a backward of every microbatch.

    The last ``turn`` of them are still whole when their backward begins.
    """
    ahead = back = 0.0
    if split.lending.segments_held:
        ahead = _gathered(units, split, device)
        back = _gathered(units[: max(0, len(units) - turn)], split, device) if turn else ahead
    if split.lending.reduce == "microbatch":
        back += _scattered(units, split, device)
    return as_work(ahead, split, device), as_work(back, split, device)


def once_a_step(units: Sequence[Unit], split: ModelSplit, device: Device) -> float:
    """Seconds of the messages of ``units`` that are sent once a step: of what is not lent the sum of its gradients."""
    if not split.lends:
        return summed(units, split, device, split.gradient_bytes)
    seconds = 0.0 if split.lending.segments_held else _gathered(units, split, device)
    return seconds + (_scattered(units, split, device) if split.lending.reduce == "step" else 0.0)
