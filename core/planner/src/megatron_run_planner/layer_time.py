"""Seconds of one layer, of the embedding and of the head on one rank: a roofline, operator by operator.

The operators follow in closed form. A *product* is a matrix product; a *sweep* reads and writes memory once. Both are
those of one forward; a backward does each product twice (for its input and its weight). Values are of two bytes.

A product takes its FLOPs at the share of the peak that its shape reaches, a sweep its bytes at the memory's share, and
neither less than one kernel. The device works on them while the host launches kernels: where both take about as long,
neither hides the other wholly, and the two are joined: as the sides of a right triangle where a device's ``power`` is
2, and the larger the power, the more the longer hides of the shorter. On a processor they add. Collectives come on top.

Legend: ``n`` = ``s b`` tokens, ``h`` hidden, ``t`` tensor-parallel size, ``a`` heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2
from typing import NamedTuple

from megatron_run_planner.devices import Device, LayerShape, Links
from megatron_run_planner.passes import Pass, layer_passes, loss_pass, norm_pass
from megatron_run_planner.workload import Model, Split

#: Bytes of an activation.
_WIDTH = 2
#: Bytes of a value in sweeps.
_COUNTED = 2


class Product(NamedTuple):
    """``copies`` products (rows x depth) @ (depth x columns)."""

    rows: float
    columns: float
    depth: float
    copies: float = 1

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2 * self.rows * self.columns * self.depth * self.copies


class Sweep(NamedTuple):
    """``kernels`` kernels, each of which moves ``bytes``."""

    bytes: float
    kernels: int = 1


class Operators(NamedTuple):
    """One forward: ``attention`` FLOPs of scores and context, and whether the softmax is ``unfused``.

    ``products`` are ``attending`` of the attention and then those of the feed-forward layer; ``sweeps`` the norms, the
    residual connections, the activation, the heads' layouts, and then those of stored scores.
    """

    products: tuple[Product, ...]
    attention: float
    sweeps: tuple[Sweep, ...]
    unfused: bool = False
    attending: int = 2


def layer_operators(model: Model, micro_batch: int, tensor: int, expert: int = 1) -> Operators:
    """The forward of one layer for ``micro_batch`` samples on one of ``tensor`` ranks.

    With experts, every rank computes as many choices of tokens as it brings (an even load over ``expert`` ranks).
    """
    n, h, t = micro_batch * model.sequence, model.hidden, tensor
    wide = model.ffn_width
    up = wide * (model.matrices - 1)
    if model.experts:
        held = max(1.0, model.experts / expert)
        rows = n * model.top_k / held
        feed = [Product(rows, up / t, h, held), Product(rows, h, wide / t, held)]
    else:
        held, rows = 1.0, n
        feed = [Product(n, up / t, h), Product(n, h, wide / t)]
    if model.experts and model.shared_ffn:
        shared = model.shared_ffn
        feed += [Product(n, shared * (model.matrices - 1) / t, h), Product(n, h, shared / t)]
    width = model.context_width / t
    attending = [Product(n, model.qkv_width / t, h), Product(n, h, width)]
    if model.across:  # queries and output, then keys and values of the encoder's tokens
        attending += [Product(n, width, h), Product(n, h, width), Product(micro_batch * model.across, 2 * width, h)]
    scores = micro_batch * model.heads / t * model.sequence**2
    parts = 3 if model.across else 2
    sweeps = [
        Sweep(2 * _WIDTH * n * h, parts),  # the norms
        Sweep(3.5 * _WIDTH * n * h, parts),  # bias, dropout and residual, with the dropout's mask
        Sweep(2 * _WIDTH * rows * held * up / t),  # bias and activation
        Sweep(2 * _WIDTH * n * width, 3 * (parts - 1)),  # queries, keys and values, each to its own layout
    ]
    if not model.flash:
        sweeps += [Sweep(2 * _WIDTH * scores), Sweep(2.5 * _WIDTH * scores)]  # softmax; dropout with its mask
    # The fused softmax serves whole blocks of four heads; other shapes take six kernels of plain operators.
    unfused = not model.flash and (micro_batch * model.heads / t) % 4 != 0
    if unfused:
        sweeps.append(Sweep(2 * _WIDTH * scores, 6))
    looks = micro_batch * model.heads / t * model.sequence * model.across
    flops = 4 * (scores + looks) * model.head_size
    return Operators((*attending, *feed), flops, tuple(sweeps), unfused, len(attending))


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


def sum_over(device: Device, split: Split, size: float, members: int, stride: int = 1) -> float:
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
    """Seconds until ``size`` bytes have reached the neighbouring stage, ``stride`` devices of ``ranks`` away."""
    if links.messages:
        near = min(links.messages, key=lambda each: abs(each.ranks - ranks))
        return near.latency + size / near.bandwidth
    if stride < links.machine:
        return links.latency + size / links.bandwidth
    return links.machine_latency + size / links.machine_bandwidth


def layer_time(model: Model, split: Split, device: Device) -> Passes:
    """One layer: forward, and backward with what it recomputes; of several kinds the mean."""
    if len(model.kinds) > 1:
        parts = [layer_time(kind, split, device).times(share) for share, kind in model.kinds]
        return parts[0].then(parts[1])
    work = layer_operators(model, split.micro_batch, split.tensor, split.expert)
    products = sum(product_seconds(each, device) for each in work.products)
    attention = work.attention / (device.peak * device.products.attention)
    scores = max(attention, 2 * device.host.kernel)
    swept, swept_back = _swept(work, model, split, device)
    shared = _shared(model, split, device)
    host = device.host.layer + (device.host.softmax if work.unfused else 0)
    if model.experts:
        host += device.host.experts + device.host.expert * model.experts / split.expert
    share = device.host.forward
    # Attention that keeps no scores computes them again in its backward.
    again = 2.5 if model.flash else 2
    forward = _joined(products + scores + swept, host * share, device)
    whole = 2 * products + again * scores + swept_back
    backward = _joined(whole, host * (1 - share), device)
    shape = LayerShape(model.hidden, model.heads, model.sequence, split.tensor, split.micro_batch)
    ahead, back = device.measured_ratio(shape) if model.plain(fused=device.fused) else (1.0, 1.0)
    feeding = sum(product_seconds(each, device) for each in work.products[work.attending :])
    half = _joined(feeding + _sweep(work.sweeps[2], device), 0, device)
    if not device.host.overlaps:
        half += host * share / 2
    if device.cores:  # ratios are those of one rank's work: what ranks say to each other was measured by itself
        forward, backward, half, products = forward * ahead, backward * back, half * ahead, products * back
    repeated = {
        "none": 0.0,
        "core": scores + sum(_sweep(each, device) for each in work.sweeps[4:]),
        "mlp": half + shared / (3 if model.across else 2),
        "full": forward + shared + _counted(model, split, device),
    }[split.recompute]
    passes = Passes(forward + shared + _counted(model, split, device), backward + shared + repeated, products)
    return passes if device.cores else passes.times(ahead)


def _swept(work: Operators, model: Model, split: Split, device: Device) -> tuple[float, float]:
    """Seconds of the sweeps of one layer, forward and backward."""
    if device.sweeps.counted:
        return _passed(layer_passes(model, split, kernels=device.sweeps.kernels), device)
    swept = sum(_sweep(each, device) for each in work.sweeps)
    return swept, device.sweeps.backward * swept


def _passed(passes: Iterable[Pass], device: Device) -> tuple[float, float]:
    """Seconds of ``passes``, forward and backward."""
    ahead = back = 0.0
    for each in passes:
        ahead += _sweep(Sweep(each.forward / max(1, each.ahead), each.ahead), device)
        back += _sweep(Sweep(each.backward / max(1, each.back), each.back), device)
    return ahead, back


def _shared(model: Model, split: Split, device: Device) -> float:
    """Seconds that ranks exchange in a forward of one layer, and as many in its backward.

    A sum after each attention and one after the feed-forward layer; with sequence parallelism, as much in halves.
    """
    tokens = split.micro_batch * model.sequence
    sums = 3 if model.across else 2
    shared = sums * sum_over(device, split, device.width * tokens * model.hidden, split.tensor)
    if model.experts and split.expert > 1:
        routed = device.width * tokens * model.top_k * model.hidden / split.tensor
        shared += 2 * _exchanged(routed, split, device)
    return _as_work(shared, split, device)


def _counted(model: Model, split: Split, device: Device) -> float:
    """Seconds in which expert ranks tell each other how many tokens they send, where small sums were measured."""
    if not (model.experts and split.expert > 1 and device.links.sums):
        return 0.0
    return _as_work(_exchanged(8.0 * model.experts, split, device), split, device)


def _exchanged(size: float, split: Split, device: Device) -> float:
    """An all-to-all among the expert ranks; where sums were measured, in proportion to one of half its bytes."""
    if not device.links.sums:
        return exchange(device.links, size, split.expert, split.tensor)
    return device.links.exchange * sum_over(device, split, size / 2, split.expert)


def _as_work(seconds: float, split: Split, device: Device) -> float:
    """``seconds`` measured while all ranks of ``split`` share the cores, as those that one rank alone would take."""
    return seconds / device.cores.slower(split.ranks, split.ranks) if device.cores else seconds


def embedding_time(model: Model, split: Split, device: Device) -> Passes:
    """The embedding: a gather forward, a scatter backward, and the sum over the tensor ranks."""
    size = device.width * split.micro_batch * model.tokens * model.hidden
    moved = 2 * size / (device.bandwidth * device.sweeps.efficiency)
    shared = _as_work(sum_over(device, split, size, split.tensor), split, device)
    host = device.host
    forward = _joined(moved, host.embedding * host.forward, device) + shared
    return Passes(forward, _joined(2 * moved, host.embedding * (1 - host.forward), device))


def loading_time(model: Model, split: Split, device: Device) -> Passes:
    """A microbatch: every stage that needs its fields loads it, in its forward."""
    return Passes(device.host.batch + device.host.token * split.micro_batch * model.tokens, 0.0)


def head_time(model: Model, split: Split, device: Device) -> Passes:
    """Final norm, logits and loss. Over tensor ranks the loss takes a maximum and two sums at once, its input a sum."""
    tokens = split.micro_batch * model.sequence
    columns = model.vocabulary / split.tensor
    product = product_seconds(Product(tokens, columns, model.hidden), device)
    swept, swept_back = _swept_head(model, split, device)
    small = _as_work(sum(sum_over(device, split, 4 * n * tokens, split.tensor) for n in (1, 2)), split, device)
    large = _as_work(sum_over(device, split, device.width * tokens * model.hidden, split.tensor), split, device)
    host = device.host
    forward = _joined(product + swept, host.head * host.forward, device) + small
    backward = _joined(2 * product + swept_back, host.head * (1 - host.forward), device) + large
    return Passes(forward, backward, product)


def _swept_head(model: Model, split: Split, device: Device) -> tuple[float, float]:
    """Seconds of the sweeps of final norm and loss, forward and backward."""
    tokens, columns, sweeps = split.micro_batch * model.sequence, model.vocabulary / split.tensor, device.sweeps
    if sweeps.counted:
        stream = _WIDTH * tokens * model.hidden / (split.tensor if split.sequence_parallel else 1)
        norm = norm_pass(stream, kernels=sweeps.kernels)
        return _passed((norm, loss_pass(tokens, columns, kernels=sweeps.kernels)), device)
    swept = sweeps.loss * 4 * tokens * columns / (device.bandwidth * sweeps.efficiency)
    return swept * sweeps.loss_forward, swept * (1 - sweeps.loss_forward)


def _joined(computed: float, launched: float, device: Device) -> float:
    """The time of work of ``computed`` seconds on the device and ``launched`` on its host."""
    if not device.host.overlaps:
        return computed + launched
    power = device.host.power
    return float((computed**power + launched**power) ** (1 / power))


def product_seconds(product: Product, device: Device) -> float:
    """Seconds of ``product``: at the share of the peak that its shape reaches, a kernel a copy at least."""
    reach = device.products
    share = reach.efficiency / (1 + reach.rows / product.rows)
    share /= 1 + reach.depth / min(product.columns, product.depth)
    if product.columns >= reach.wide:
        share = reach.wide_efficiency
    return max(product.flops / (device.peak * share), device.host.kernel * product.copies)


def _sweep(sweep: Sweep, device: Device) -> float:
    each = sweep.bytes * device.width / _COUNTED / (device.bandwidth * device.sweeps.efficiency)
    return max(each, device.host.kernel) * sweep.kernels
