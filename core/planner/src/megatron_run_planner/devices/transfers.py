"""Seconds that ranks take to sum, exchange and send bytes over the links of a device.

Ranks are numbered by tensor, context, data and pipeline, the first fastest (``tp-cp-ep-dp-pp``), and machines hold as
many in a row as they have devices: the ``stride`` of the ranks of a group says which links they meet by.
"""

from __future__ import annotations

from math import log2

from megatron_run_planner.devices import Device, Links
from megatron_run_planner.workload import ModelSplit


def all_reduce(links: Links, size: float, ranks: int, stride: int = 1) -> float:
    """Seconds in which ``ranks``, every ``stride``-th of the numbered devices, sum ``size`` bytes over a ring.

    Each rank sends 2(n-1)/n of the bytes. A ring that leaves the machine runs at the share of the network of the
    members that it has in each machine.
    """
    if ranks == 1:
        return 0.0
    wire = 2 * (ranks - 1) / ranks * size
    if ranks * stride <= links.machine:
        return links.latency * log2(ranks) + wire / links.bandwidth
    members = max(1, links.machine // stride)
    return links.machine_latency * log2(ranks) + wire / min(links.bandwidth, members * links.machine_bandwidth)


def sum_over(device: Device, split: ModelSplit, size: float, members: int, stride: int = 1) -> float:
    """Seconds in which ``members`` ranks of ``split`` sum ``size`` bytes.

    Where ranks share cores it is what was measured with as many of them, or the nearest.
    """
    if members == 1 or not device.links.sums:
        return all_reduce(device.links, size, members, stride)
    world = split.ranks
    near = min(device.links.sums, key=lambda each: abs(log2(each.members / members)) + abs(log2(each.ranks / world)))
    return near.latency + 2 * (members - 1) / members * size / near.bandwidth


def exchange(links: Links, size: float, ranks: int, stride: int = 1) -> float:
    """Seconds of an all-to-all in which each of ``ranks`` keeps 1/n of its ``size`` bytes and sends the others."""
    if ranks == 1:
        return 0.0
    wire = (ranks - 1) / ranks * size
    if ranks * stride <= links.machine:
        return links.latency * log2(ranks) + wire / links.bandwidth
    return links.machine_latency * log2(ranks) + wire / links.machine_bandwidth


def hop(links: Links, size: float, stride: int, ranks: int = 1) -> float:
    """Seconds until ``size`` bytes have reached a rank ``stride`` devices of ``ranks`` away."""
    if links.messages:
        near = min(links.messages, key=lambda each: abs(each.ranks - ranks))
        return near.latency + size / near.bandwidth
    if stride < links.machine:
        return links.latency + size / links.bandwidth
    return links.machine_latency + size / links.machine_bandwidth


def exchanged(size: float, split: ModelSplit, device: Device, members: int, stride: int) -> float:
    """An all-to-all among ``members`` ranks; where sums were measured, in proportion to one of half its bytes."""
    if not device.links.sums:
        return exchange(device.links, size, members, stride)
    return device.links.exchange * sum_over(device, split, size / 2, members)


def as_work(seconds: float, split: ModelSplit, device: Device) -> float:
    """``seconds`` measured while all ranks of ``split`` share the cores, as those that one rank alone would take."""
    return seconds / device.cores.slower(split.ranks, split.ranks) if device.cores else seconds
