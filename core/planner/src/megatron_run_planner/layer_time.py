"""Seconds of one layer, of the embedding and of the head on one rank: a roofline, operator by operator.

A product takes its FLOPs at the share of the peak that its shape reaches, a sweep its bytes at the memory's share, and
neither less than one kernel. The device works on them while the host launches kernels: where both take about as long,
neither hides the other wholly, and the two are joined as the sides of a right triangle. Collectives come on top.
"""

from __future__ import annotations

from math import hypot, log2
from typing import NamedTuple

from megatron_run_planner.devices import Device, LayerShape, Links
from megatron_run_planner.operators import Product, Sweep, layer_operators
from megatron_run_planner.workload import Model, Split

#: Bytes of an activation or gradient.
_WIDTH = 2


class Passes(NamedTuple):
    """Seconds of one microbatch's forward and backward. ``weights``: the share of the backward that a W can delay."""

    forward: float
    backward: float
    weights: float = 0.0

    def then(self, other: Passes) -> Passes:
        """One after the other."""
        return Passes(*(one + two for one, two in zip(self, other, strict=True)))

    def times(self, count: float) -> Passes:
        """``count`` of them."""
        return Passes(self.forward * count, self.backward * count, self.weights * count)


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


def exchange(links: Links, size: float, ranks: int, stride: int = 1) -> float:
    """Seconds of an all-to-all in which each of ``ranks`` keeps 1/n of its ``size`` bytes and sends the others."""
    if ranks == 1:
        return 0.0
    wire = (ranks - 1) / ranks * size
    if ranks * stride <= links.machine:
        return links.latency * log2(ranks) + wire / links.bandwidth
    return links.machine_latency * log2(ranks) + wire / links.machine_bandwidth


def hop(links: Links, size: float, stride: int) -> float:
    """Seconds until ``size`` bytes have reached the neighbouring stage, ``stride`` devices away."""
    if stride < links.machine:
        return links.latency + size / links.bandwidth
    return links.machine_latency + size / links.machine_bandwidth


def layer_time(model: Model, split: Split, device: Device) -> Passes:
    """One layer: forward, and backward with what it recomputes; of several kinds the mean."""
    if len(model.kinds) > 1:
        parts = [layer_time(kind, split, device).times(share) for share, kind in model.kinds]
        return parts[0].then(parts[1])
    work = layer_operators(model, split.micro_batch, split.tensor, split.expert)
    products = sum(_product(each, device) for each in work.products)
    attention = work.attention / (device.peak * device.products.attention)
    scores = max(attention, 2 * device.host.kernel)
    swept = sum(_sweep(each, device) for each in work.sweeps)
    tokens = split.micro_batch * model.sequence
    # An all-reduce after attention and one after the feed-forward layer; with sequence parallelism, as much in halves.
    shared = 2 * all_reduce(device.links, _WIDTH * tokens * model.hidden, split.tensor)
    if model.experts:
        routed = _WIDTH * tokens * model.top_k * model.hidden / split.tensor
        shared += 2 * exchange(device.links, routed, split.expert, split.tensor)
    host = device.host.layer + (device.host.softmax if work.unfused else 0)
    # Attention that keeps no scores computes them again in its backward.
    again = 2.5 if model.flash else 2
    forward = hypot(products + scores + swept, host / 3) + shared
    whole = 2 * products + again * scores + device.sweeps.backward * swept
    backward = hypot(whole, host * 2 / 3) + shared
    shape = LayerShape(model.hidden, model.heads, model.sequence, split.tensor, split.micro_batch)
    ratio = device.measured_ratio(shape) if model.plain else 1.0
    repeated = {
        "none": 0.0,
        "core": scores + sum(_sweep(each, device) for each in work.sweeps[4:]),
        "mlp": sum(_product(each, device) for each in work.products[2:]) + _sweep(work.sweeps[2], device) + shared / 2,
        "full": forward,
    }[split.recompute]
    return Passes(forward, backward + repeated, products).times(ratio)


def embedding_time(model: Model, split: Split, device: Device) -> Passes:
    """The embedding: a gather forward, a scatter backward, and the sum over the tensor ranks."""
    size = _WIDTH * split.micro_batch * model.sequence * model.hidden
    moved = 2 * size / (device.bandwidth * device.sweeps.efficiency)
    forward = hypot(moved, device.host.embedding / 3) + all_reduce(device.links, size, split.tensor)
    return Passes(forward, hypot(2 * moved, device.host.embedding * 2 / 3))


def head_time(model: Model, split: Split, device: Device) -> Passes:
    """Final norm, logits and loss. Over tensor ranks the loss needs three small sums and its input one large."""
    tokens = split.micro_batch * model.sequence
    columns = model.vocabulary / split.tensor
    product = _product(Product(tokens, columns, model.hidden), device)
    swept = device.sweeps.loss * 4 * tokens * columns / (device.bandwidth * device.sweeps.efficiency)
    small = 3 * all_reduce(device.links, 4 * tokens, split.tensor)
    large = all_reduce(device.links, _WIDTH * tokens * model.hidden, split.tensor)
    forward = hypot(product + swept / 2, device.host.head / 3) + small
    return Passes(forward, hypot(2 * product + swept / 2, device.host.head * 2 / 3) + large, product)


def _product(product: Product, device: Device) -> float:
    reach = device.products
    share = reach.efficiency / (1 + reach.rows / product.rows)
    share /= 1 + reach.depth / min(product.columns, product.depth)
    if product.columns >= reach.wide:
        share = reach.wide_efficiency
    return max(product.flops / (device.peak * share), device.host.kernel * product.copies)


def _sweep(sweep: Sweep, device: Device) -> float:
    each = sweep.bytes / (device.bandwidth * device.sweeps.efficiency)
    return max(each, device.host.kernel) * sweep.kernels
