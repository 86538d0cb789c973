"""Loads microbatches. Which samples this rank's microbatch m of a step holds is a pure function of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import Microbatch
from megatron_run.contracts.data import as_fields
from megatron_run_engine.data.batches import SampleStream, fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_run.contracts import Dataset
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.training.build import Assembly


#: The field of a sample that says which of its tokens count.
LOSS_MASK = "loss_mask"


class BatchLoader:
    """Loads the microbatches of one rank. Every stage loads the fields that it needs, so no data crosses ranks."""

    def __init__(self, run: ResolvedRun, assembly: Assembly) -> None:
        self._train = run.config.train
        self._device = assembly.context.device
        self._data_rank, self._data_size = assembly.context.topology.data_rank, run.sizes.data
        wanted = [field.name for p in assembly.positions for field in as_fields(assembly.model.fields(p, run.layout))]
        self._names = tuple(dict.fromkeys(wanted))

    def training(self, dataset: Dataset, step: int, consumed: int) -> Callable[[int], Microbatch]:
        """Return the loader of ``step``, whose batch starts after ``consumed`` samples of the shuffled stream."""
        stream = SampleStream(dataset, self._train.seed)

        def microbatch(index: int) -> Microbatch:
            sample0 = self._first_sample(index)
            positions = range(consumed + sample0, consumed + sample0 + self._train.micro_batch_size)
            return Microbatch(index, step, sample0, stream.fields(positions, self._names, self._device))

        return microbatch

    def evaluation(self, dataset: Dataset, samples: Sequence[int]) -> Callable[[int], Microbatch]:
        """Return the loader of an evaluation over ``samples``, which are indices into ``dataset``.

        Where the samples end, the first one is repeated with a loss mask of zeros, so that every rank has a microbatch.
        """
        size = self._train.micro_batch_size

        def microbatch(index: int) -> Microbatch:
            sample0 = self._first_sample(index)
            indices = samples[sample0 : sample0 + size]
            filled = [*indices, *[samples[0]] * (size - len(indices))]
            loaded = fields(dataset, filled, self._names, self._device)
            if len(indices) < size and LOSS_MASK in loaded:
                loaded[LOSS_MASK][len(indices) :] = 0
            return Microbatch(index, 0, sample0, loaded, train=False)

        return microbatch

    def _first_sample(self, index: int) -> int:
        """Return a microbatch's first index in the global batch. Data-parallel ranks take microbatches in turn."""
        return (index * self._data_size + self._data_rank) * self._train.micro_batch_size
