"""Weights of ``optimizer=zero3``: what is lent to segments, and the bytes that are whole at a time.

A *unit* is what one segment reads: it is whole while that runs forward, and again for its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

from megatron_run.contracts.costs import (
    AttentionCosts,
    FeedForwardCosts,
    LayerCosts,
    LayerKinds,
    ModelCosts,
    Part,
    SegmentCosts,
)
from megatron_run_planner.workload import ModelSplit, rows_of_words

#: Bytes of a weight, and of its gradient.
_HALF, _FULL = 2, 4


class Unit(NamedTuple):
    """Weights of a segment on a rank that are lent: those of all replicas, and those of ``experts``."""

    dense: float = 0.0
    experts: float = 0.0

    @property
    def size(self) -> float:
        """All of them."""
        return self.dense + self.experts

    def plus(self, other: Unit, times: float = 1) -> Unit:
        """These, and ``other`` so many ``times``."""
        return Unit(self.dense + times * other.dense, self.experts + times * other.experts)


class Lent(NamedTuple):
    """Bytes that a rank has less of ``parameters`` and ``gradients`` all through a step than whole ones have.

    ``passing`` are the bytes of both that segments hold in turn, at most.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    passing: float = 0.0


def lent(model: ModelCosts, split: ModelSplit, layers: LayerKinds, ends: Sequence[bool]) -> Lent:
    """The bytes that a rank with these ``layers`` lends; ``ends`` say whether it has the embedding, and the head.

    Layers of a kind are taken to follow one another. What is whole from its first use in a step to the update is there
    beside the rank's share.
    """
    if not split.lends:
        return Lent()
    held, each_microbatch = split.lending.segments_held, split.lending.reduce == "microbatch"
    before, behind = _before(model, split, ends), _behind(model, split, ends)
    inner: list[Unit] = []
    total = sum_of((*before, *behind))
    for count, layer in layers.counts:
        units = layer_units(layer, split)
        inner += units * min(ceil(count), max(held, 2))
        total = total.plus(sum_of(units), count)
    sizes = [unit.size for unit in (*before, *inner, *behind)]
    passing = _HALF * _most(sizes, held) + _FULL * each_microbatch * _most(sizes, 2)
    share = total.dense / split.replicas + total.experts * split.expert / split.replicas
    away = total.size - share
    return Lent(_HALF * (away if held else -share), _FULL * (away if each_microbatch else -share), passing)


def sum_of(units: Iterable[Unit]) -> Unit:
    """All weights of ``units``."""
    total = Unit()
    for unit in units:
        total = total.plus(unit)
    return total


def _most(sizes: Sequence[float], held: int) -> float:
    """The largest sum of so many neighbours."""
    return max((sum(sizes[first : first + held]) for first in range(len(sizes))), default=0.0)


def layer_units(layer: LayerCosts, split: ModelSplit) -> list[Unit]:
    """The units of one layer, in the order of its forward."""
    found = (unit for part in layer.parts for unit in _part_units(part, layer.hidden, split))
    return [unit for unit in found if unit.size]


def _part_units(part: Part, hidden: int, split: ModelSplit) -> Iterator[Unit]:
    """Those of a part: a mixture of experts has its router, the experts, and a shared expert behind them."""
    match part:
        case AttentionCosts():
            yield _dense(split, hidden * part.columns / split.tensor, hidden * part.context / split.tensor)
        case FeedForwardCosts(experts=0):
            yield _dense(split, *_matrices(part, hidden, part.features, split))
        case FeedForwardCosts():
            yield _dense(split, hidden * part.experts / split.tensor)
            on_rank = part.experts / split.expert
            yield _of_experts(split, *(on_rank * size for size in _matrices(part, hidden, part.features, split)))
            yield _dense(split, *_matrices(part, hidden, part.shared, split))
        case SegmentCosts():
            yield _dense(split, *(inputs * outputs / split.tensor for inputs, outputs in part.products))


def _matrices(part: FeedForwardCosts, hidden: int, features: int, split: ModelSplit) -> tuple[float, float]:
    """Values of the two matrices of a feed-forward network on a rank."""
    one = hidden * features / split.tensor
    return (part.matrices - 1) * one, one


def _dense(split: ModelSplit, *sizes: float) -> Unit:
    return Unit(dense=_large(split, sizes))


def _of_experts(split: ModelSplit, *sizes: float) -> Unit:
    """Without another replica they stay whole."""
    return Unit(experts=_large(split, sizes) if split.replicas > split.expert else 0.0)


def _large(split: ModelSplit, sizes: Sequence[float]) -> float:
    """The values of those parameters that are not so small that they stay whole."""
    return sum(size for size in sizes if size >= split.lending.whole_below)


def embedding_unit(model: ModelCosts, split: ModelSplit) -> Unit:
    """The unit of the embedding."""
    return _dense(split, _words(model, split), model.positions * model.hidden)


def head_unit(model: ModelCosts, split: ModelSplit) -> Unit:
    """The unit of the head: the table of words, and matrices of its own."""
    return _dense(split, model.logits * _words(model, split), model.head_weights, model.other_weights)


def _words(model: ModelCosts, split: ModelSplit) -> float:
    return rows_of_words(model.vocabulary, split.tensor) * model.hidden / split.tensor


def _before(model: ModelCosts, split: ModelSplit, ends: Sequence[bool]) -> list[Unit]:
    return [embedding_unit(model, split)] if ends[0] else []


def _behind(model: ModelCosts, split: ModelSplit, ends: Sequence[bool]) -> list[Unit]:
    """The head's, where no segment before it reads the table, and those of predictors."""
    if not ends[1]:
        return []
    shared = model.tied and ends[0]
    head = _dense(split, model.head_weights, model.other_weights) if shared else head_unit(model, split)
    joining = _dense(split, 2 * model.hidden**2 / split.tensor)
    predictor = [joining, *layer_units(model.layers[-1], split)] if model.predictors else []
    return [unit for unit in (head, *predictor * model.predictors) if unit.size]
