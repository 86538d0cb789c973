"""Seconds of one layer, of the embedding and of the head on one rank: a roofline, operator by operator.

The operators follow in closed form. A *product* is a matrix product; a *sweep* reads and writes memory once. Both are
those of one forward; a backward does each product twice (for its input and its weight). Values are of two bytes.

A product takes its FLOPs at the share of the peak that its shape reaches, a sweep its bytes at the memory's share, and
neither less than one kernel. The device works on them while the host launches kernels: where both take about as long,
neither hides the other wholly, and the two are joined: as the sides of a right triangle where a device's ``power`` is
2, and the larger the power, the more the longer hides of the shorter. On a processor they add. Collectives come on top,
but for those of weights that are lent, which travel beside the work.

Legend: ``n`` = ``s b`` tokens, ``h`` hidden, ``t`` tensor-parallel size, ``a`` heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_run.contracts.costs import AttentionCosts, FeedForwardCosts, LayerCosts, ModelCosts, SegmentCosts
from megatron_run_planner.devices import Device, LayerShape
from megatron_run_planner.devices.transfers import as_work, exchanged, sum_over
from megatron_run_planner.layer_time.messages import each_microbatch
from megatron_run_planner.layer_time.passes import (
    CLEARED,
    SUMMED,
    Pass,
    joining_passes,
    layer_passes,
    loss_pass,
    norm_pass,
)
from megatron_run_planner.memory.lent import Unit, embedding_unit, head_unit, layer_units
from megatron_run_planner.split_samples import waits
from megatron_run_planner.workload import ModelSplit, gpt2_heads

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

    ``feeding`` are the products of feed-forward parts, ``mixing`` those of the others; ``sweeps`` the norms, the
    residual connections and the heads' layouts, ``activations`` of feed-forward parts, and ``scores`` that are stored.
    """

    mixing: tuple[Product, ...] = ()
    feeding: tuple[Product, ...] = ()
    attention: float = 0.0
    sweeps: tuple[Sweep, ...] = ()
    activations: tuple[Sweep, ...] = ()
    scores: tuple[Sweep, ...] = ()
    unfused: bool = False

    @property
    def products(self) -> tuple[Product, ...]:
        """All of them."""
        return self.mixing + self.feeding

    @property
    def moved(self) -> tuple[Sweep, ...]:
        """All sweeps."""
        return self.sweeps + self.activations + self.scores


def layer_operators(layer: LayerCosts, micro_batch: int, tensor: int, expert: int = 1, context: int = 1) -> Operators:
    """The forward of one layer for ``micro_batch`` samples on one of ``tensor`` ranks, and of ``context`` ranks.

    With experts, every rank computes as many choices of tokens as it brings (an even load over ``expert`` ranks).
    """
    rows = micro_batch * layer.tokens / context
    stream = _WIDTH * rows * layer.hidden
    # The norms; then bias, dropout and residual, with the dropout's mask.
    sweeps = Sweep(2 * stream, len(layer.parts)), Sweep(3.5 * stream, len(layer.parts))
    parts = [Operators(sweeps=sweeps)]
    for part in layer.parts:
        match part:
            case AttentionCosts():
                parts.append(_attending(part, layer, micro_batch, tensor, rows))
            case FeedForwardCosts():
                parts.append(_feeding(part, layer, rows, tensor, expert))
            case SegmentCosts():
                parts.append(_segment(part, rows, tensor))
    return Operators(*(sum(each, type(each[0])()) for each in zip(*parts, strict=True)))


def _attending(part: AttentionCosts, layer: LayerCosts, micro_batch: int, t: int, n: float) -> Operators:
    h, width = layer.hidden, part.context / t
    # Queries, keys and values, each to its own layout.
    sweeps = (Sweep(2 * _WIDTH * n * width, 3),)
    pairs = n * part.heads / t * (part.across or layer.tokens)
    flops = 4 * pairs * part.head_size
    if part.across:  # queries and output, then keys and values of the others' tokens
        products = Product(n, width, h), Product(n, h, width), Product(micro_batch * part.across, 2 * width, h)
        return Operators(products, attention=flops, sweeps=sweeps)
    own = Product(n, part.columns / t, h), Product(n, h, width)
    if part.flash:
        return Operators(own, attention=flops, sweeps=sweeps)
    stored = Sweep(2 * _WIDTH * pairs), Sweep(2.5 * _WIDTH * pairs)  # softmax; dropout with its mask
    # The fused softmax serves whole blocks of four heads; other shapes take six kernels of plain operators.
    unfused = (micro_batch * part.heads / t) % 4 != 0
    more = (Sweep(2 * _WIDTH * pairs, 6),) if unfused else ()
    return Operators(own, attention=flops, sweeps=sweeps, scores=(*stored, *more), unfused=unfused)


def _feeding(part: FeedForwardCosts, layer: LayerCosts, n: float, t: int, expert: int) -> Operators:
    h, wide = layer.hidden, part.features
    up = wide * (part.matrices - 1)
    held = max(1.0, part.experts / expert) if part.experts else 1
    rows = n * part.routed / held if part.experts else n
    feed: tuple[Product, ...] = (Product(rows, up / t, h, held), Product(rows, h, wide / t, held))
    if part.experts and part.shared:
        feed += (Product(n, part.shared * (part.matrices - 1) / t, h), Product(n, h, part.shared / t))
    return Operators(feeding=feed, activations=(Sweep(2 * _WIDTH * rows * held * up / t),))  # with the bias


def _segment(part: SegmentCosts, n: float, t: int) -> Operators:
    """Operations beside products count as attention's do, and are no longer than the sweeps are."""
    products = tuple(Product(n, outputs / t, inputs) for inputs, outputs in part.products)
    sweeps = (Sweep(_WIDTH * n * part.moved / t / part.kernels, part.kernels),) if part.kernels else ()
    return Operators(products, attention=n * part.operations / t, sweeps=sweeps)


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


def mean_layer(model: ModelCosts, split: ModelSplit, device: Device) -> Passes:
    """One layer of ``model``, on average."""
    kinds = model.kinds
    return sum_of(layer_time(layer, split, device).times(count / kinds.total) for count, layer in kinds.counts)


def sum_of(passes: Iterable[Passes]) -> Passes:
    """All ``passes``, one after the other."""
    found = Passes(0.0, 0.0)
    for each in passes:
        found = found.then(each)
    return found


def layer_time(layer: LayerCosts, split: ModelSplit, device: Device) -> Passes:
    """One layer: forward, and backward with what it recomputes, beside which its weights travel where they are lent."""
    return lent_time(layer, working_time(layer, split, device), split, device)


def lent_time(layer: LayerCosts, work: Passes, split: ModelSplit, device: Device, turn: int = 0) -> Passes:
    """The ``work`` of a layer beside which its weights travel, all but those of the last ``turn`` segments again."""
    return _beside(layer_units(layer, split), work, split, device, turn) if split.lends else work


def _beside(units: Sequence[Unit], work: Passes, split: ModelSplit, device: Device, turn: int = 0) -> Passes:
    """The longer of ``work`` and the messages of ``units``; on cores that ranks share both, one after the other.

    Gradients that leave in every microbatch are cleared before, and a rank's share of them is added up.
    """
    if split.lending.reduce == "microbatch":
        moved = (CLEARED + SUMMED / split.replicas) * sum(unit.size for unit in units)
        work = work.then(Passes(0.0, moved / (device.bandwidth * device.sweeps.efficiency)))
    ahead, back = each_microbatch(units, split, device, turn)
    if device.cores:
        return work.then(Passes(ahead, back))
    return Passes(max(work.forward, ahead), max(work.backward, back), work.weights)


def working_time(layer: LayerCosts, split: ModelSplit, device: Device) -> Passes:
    """One layer whose weights are there."""
    work = layer_operators(layer, split.micro_batch, split.tensor, split.expert, split.context)
    products = sum(product_seconds(each, device) for each in work.products)
    attention = work.attention / (device.peak * device.products.attention)
    scores = max(attention, 2 * device.host.kernel) if work.attention else 0.0
    swept, swept_back = _swept(work, layer, split, device)
    shared = _shared(layer, split, device)
    host = 0.0 if _at_once(split, device) else _launching(work, layer, split, device)
    share = device.host.forward
    # Attention that keeps no scores computes them again in its backward.
    again = 2 if work.scores else 2.5
    moved, moved_back = _passed(joining_passes(layer, split), device)
    late, late_back = waits(layer, split, device, scores + moved, again * scores + moved_back)
    forward = _joined(products + scores + moved + swept, host * share, device)
    whole = 2 * products + again * scores + moved_back + swept_back
    backward = _joined(whole, host * (1 - share), device)
    heads = gpt2_heads(layer, fused=device.fused)
    shape = LayerShape(layer.hidden, heads, layer.tokens // split.context, split.tensor, split.micro_batch)
    ahead, back = device.measured_ratio(shape) if heads else (1.0, 1.0)
    feeding = sum(product_seconds(each, device) for each in work.feeding)
    half = _joined(feeding + sum(_sweep(each, device) for each in work.activations), 0, device)
    if not device.host.overlaps:
        half += host * share / 2
    if device.cores:  # ratios are those of one rank's work: what ranks say to each other was measured by itself
        forward, backward, half, products = forward * ahead, backward * back, half * ahead, products * back
    repeated = {
        "none": 0.0,
        "core": scores + moved + late + sum(_sweep(each, device) for each in work.scores),
        "mlp": half + shared / len(layer.parts),
        "full": forward + late + shared + _counted(layer, split, device),
    }[split.recompute]
    forward += late + shared + _counted(layer, split, device)
    passes = Passes(forward, backward + late_back + shared + repeated, products)
    return passes if device.cores else passes.times(ahead)


def _at_once(split: ModelSplit, device: Device) -> bool:
    """Whether one graph of the step launches all kernels, so that the device never waits for its host."""
    return bool(split.one_graph) and device.host.overlaps


def _launching(work: Operators, layer: LayerCosts, split: ModelSplit, device: Device) -> float:
    """Seconds of the host for one layer, forward and backward."""
    host = device.host.layer + (device.host.softmax if work.unfused else 0)
    for part in layer.feeds:
        if part.experts:
            host += device.host.experts + device.host.expert * part.experts / split.expert
    return host


def _swept(work: Operators, layer: LayerCosts, split: ModelSplit, device: Device) -> tuple[float, float]:
    """Seconds of the sweeps of one layer, forward and backward."""
    if device.sweeps.counted:
        return _passed(layer_passes(layer, split, kernels=device.sweeps.kernels), device)
    swept = sum(_sweep(each, device) for each in work.moved)
    return swept, device.sweeps.backward * swept


def _passed(passes: Iterable[Pass], device: Device) -> tuple[float, float]:
    """Seconds of ``passes``, forward and backward."""
    ahead = back = 0.0
    for each in passes:
        ahead += _sweep(Sweep(each.forward / max(1, each.ahead), each.ahead), device)
        back += _sweep(Sweep(each.backward / max(1, each.back), each.back), device)
    return ahead, back


def _shared(layer: LayerCosts, split: ModelSplit, device: Device) -> float:
    """Seconds that ranks exchange in a forward of one layer, and as many in its backward.

    A sum after each part; with sequence parallelism, as much in halves.
    """
    tokens = split.rows(layer.tokens)
    shared = len(layer.parts) * sum_over(device, split, device.width * tokens * layer.hidden, split.tensor)
    for part in layer.feeds:
        if part.experts and split.expert > 1:
            routed = device.width * tokens * part.top_k * layer.hidden / split.tensor
            shared += 2 * exchanged(routed, split, device, split.expert, split.tensor * split.context)
    return as_work(shared, split, device)


def _counted(layer: LayerCosts, split: ModelSplit, device: Device) -> float:
    """Seconds in which expert ranks tell each other how many tokens they send, where small sums were measured."""
    if not (layer.experts and split.expert > 1 and device.links.sums):
        return 0.0
    return as_work(
        exchanged(8.0 * layer.experts, split, device, split.expert, split.tensor * split.context), split, device
    )


def embedding_time(model: ModelCosts, split: ModelSplit, device: Device) -> Passes:
    """The embedding: a gather forward, a scatter backward, and the sum over the tensor ranks."""
    size = device.width * split.rows(model.tokens) * model.hidden
    moved = 2 * size / (device.bandwidth * device.sweeps.efficiency)
    shared = as_work(sum_over(device, split, size, split.tensor), split, device)
    share, host = device.host.forward, 0.0 if _at_once(split, device) else device.host.embedding
    forward = _joined(moved, host * share, device) + shared
    work = Passes(forward, _joined(2 * moved, host * (1 - share), device))
    return _beside([embedding_unit(model, split)], work, split, device) if split.lends else work


def loading_time(model: ModelCosts, split: ModelSplit, device: Device) -> Passes:
    """A microbatch: every stage that needs its fields loads it, in its forward; ranks read whole samples."""
    return Passes(device.host.batch + device.host.token * split.micro_batch * model.tokens, 0.0)


def head_time(model: ModelCosts, split: ModelSplit, device: Device) -> Passes:
    """The head, whose weights are at the turn from forward to backward: where they are lent, they are gathered once."""
    work = _working_head(model, split, device)
    return _beside([head_unit(model, split)], work, split, device, turn=1) if split.lends else work


def _working_head(model: ModelCosts, split: ModelSplit, device: Device) -> Passes:
    """Final norm, logits and loss. Over tensor ranks the loss takes a maximum and two sums at once, its input a sum.

    Matrices of the head besides are whole on every rank; without logits there is neither their product nor their loss.
    """
    tokens, product = split.rows(model.sequence), 0.0
    if model.head_weights:
        product += product_seconds(Product(tokens, model.head_weights / model.hidden, model.hidden), device)
    if not model.logits:
        swept, swept_back = _passed(_final_norm(model, split, device), device)
        return Passes(product + swept, 2 * product + swept_back, product)
    product += product_seconds(Product(tokens, model.vocabulary / split.tensor, model.hidden), device)
    swept, swept_back = _swept_head(model, split, device)
    small = as_work(sum(sum_over(device, split, 4 * n * tokens, split.tensor) for n in (1, 2)), split, device)
    large = as_work(sum_over(device, split, device.width * tokens * model.hidden, split.tensor), split, device)
    share, host = device.host.forward, 0.0 if _at_once(split, device) else device.host.head
    forward = _joined(product + swept, host * share, device) + small
    backward = _joined(2 * product + swept_back, host * (1 - share), device) + large
    return Passes(forward, backward, product)


def _swept_head(model: ModelCosts, split: ModelSplit, device: Device) -> tuple[float, float]:
    """Seconds of the sweeps of final norm and loss, forward and backward."""
    tokens, columns, sweeps = split.rows(model.sequence), model.vocabulary / split.tensor, device.sweeps
    if sweeps.counted:
        loss = loss_pass(tokens, columns, kernels=sweeps.kernels)
        return _passed((*_final_norm(model, split, device), loss), device)
    swept = sweeps.loss * 4 * tokens * columns / (device.bandwidth * sweeps.efficiency)
    return swept * sweeps.loss_forward, swept * (1 - sweeps.loss_forward)


def _final_norm(model: ModelCosts, split: ModelSplit, device: Device) -> tuple[Pass]:
    tokens = split.rows(model.sequence)
    stream = _WIDTH * tokens * model.hidden / (split.tensor if split.sequence_parallel else 1)
    return (norm_pass(stream, kernels=device.sweeps.kernels),)


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
