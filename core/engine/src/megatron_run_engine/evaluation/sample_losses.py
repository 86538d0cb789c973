"""The loss of a model on samples of its data: one path for a training's evaluations and for the tasks of a split.

A sample keeps all its fields, so what its masks, positions and documents say holds as in training.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from megatron_run.contracts import Microbatch
from megatron_run.contracts.data import LOSS_MASK
from megatron_run.errors import DataError
from megatron_run_engine.data.batches import fields
from megatron_run_engine.runtime.execute import StepInputs
from megatron_run_engine.runtime.losses import LANGUAGE_MODEL, Losses
from megatron_run_engine.runtime.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_run.contracts import Dataset
    from megatron_run_engine.runtime.generation import Network


class SampleLoss(NamedTuple):
    """The mean loss of some samples, in nats for each of ``tokens`` that count."""

    loss: float
    tokens: int


def score_samples(
    network: Network,
    dataset: Dataset,
    samples: Sequence[int],
    rows: int,
    at_once: int = 1,
    progress: Callable[[int], object] | None = None,
) -> SampleLoss:
    """Score ``samples``, which are indices into ``dataset``, with ``rows`` of them in a microbatch.

    ``at_once`` microbatches go through the stages together, which bounds the memory of messages. Dropout must be off.
    ``progress`` is told how many samples are scored. Raises :class:`DataError` where no token counts. Collective over
    the world: the data-parallel copies take microbatches in turn.
    """
    context, model = network.context, network.model
    metrics = Metrics(context.device)
    report = Losses(model, metrics).report
    length = network.context.pieces.part(network.positions)
    boundary = partial(model.boundary, micro_batch_size=rows, sequence_length=length)
    turn = rows * context.topology.sizes.data
    turns = -(-len(samples) // turn)
    for first in range(0, turns, at_once):
        load = partial(_microbatch, network, dataset, samples[first * turn :], rows)
        network.executor.run(network.forwards(min(at_once, turns - first)), StepInputs(load, boundary, report))
        if progress:
            progress(min((first + at_once) * turn, len(samples)))
    return _language_loss(network, metrics)


def _microbatch(network: Network, dataset: Dataset, samples: Sequence[int], rows: int, index: int) -> Microbatch:
    """This rank's microbatch ``index`` of ``samples``.

    Where the samples end, the first one is repeated with a loss mask of zeros, so that every rank has a microbatch.
    """
    topology = network.context.topology
    sample0 = (index * topology.sizes.data + topology.data_rank) * rows
    indices = samples[sample0 : sample0 + rows]
    filled = [*indices, *[samples[0]] * (rows - len(indices))]
    loaded = fields(dataset, filled, network.reads, network.context.device, network.cut)
    if len(indices) < rows and LOSS_MASK.name in loaded:
        loaded[LOSS_MASK.name][len(indices) :] = 0
    return Microbatch(index, 0, sample0, loaded, train=False)


def _language_loss(network: Network, metrics: Metrics) -> SampleLoss:
    sums = metrics.collect(network.context.groups).tolist()
    total, weight = sums[metrics.names.index(LANGUAGE_MODEL)]
    if not weight:
        raise DataError("the samples hold no token that counts", why="their loss_mask is zero")
    # Every tensor-parallel rank reports the same tokens: the factor cancels in the mean, but not in the count.
    return SampleLoss(total / weight, round(weight / network.context.topology.sizes.tensor))
