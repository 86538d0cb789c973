"""Loads microbatches. Which samples this rank's microbatch m of a step holds is a pure function of the step."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from megatron_run.contracts import Microbatch
from megatron_run_engine.data.batches import SampleStream
from megatron_run_engine.training.build import read_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.data.batches import RunSamples
    from megatron_run_engine.training.build import Assembly


#: Microbatches of a step that are loaded in the one before. A GPU computes the first few longer than the host needs to
#: load the others; a graph of the whole step needs all of them.
AHEAD = 8


class BatchLoader:
    """Loads the microbatches of one rank. Every stage loads the fields that it needs, so no data crosses ranks."""

    def __init__(self, run: ResolvedRun, assembly: Assembly) -> None:
        self._train = run.config.train
        self._device = assembly.context.device
        self._data_rank, self._data_size = assembly.context.topology.data_rank, run.sizes.data
        self._cut = assembly.network.cut
        self._names = read_fields(run, assembly.model, assembly.positions)
        # On a CPU, the host would load later what it loads earlier. A mean over tokens needs all masks at first.
        ahead = AHEAD if self._train.loss_mean == "microbatch" else self._train.global_batch_size
        self._ahead = ahead if self._device.type == "cuda" else 0
        self._loaded: dict[tuple[int, int], dict[str, Tensor]] = {}  # by consumed samples and microbatch

    def load_ahead(self, dataset: RunSamples, consumed: int, microbatches: int) -> None:
        """Load the first of ``microbatches`` of a step that may come, while a GPU still works on the one before.

        A step after other ``consumed`` samples loads its own. So does one whose samples could not be read here: what is
        wrong with them is said once they are needed.
        """
        self._loaded.clear()
        with suppress(Exception):
            for index in range(min(microbatches, self._ahead)):
                self._loaded[consumed, index] = self._fields(dataset, consumed, index)

    def training(self, dataset: RunSamples, step: int, consumed: int) -> Callable[[int], Microbatch]:
        """Return the loader of ``step``, whose batch starts after ``consumed`` samples of the shuffled stream."""

        def microbatch(index: int) -> Microbatch:
            found = self._loaded.pop((consumed, index), None)
            loaded = self._fields(dataset, consumed, index) if found is None else found
            return Microbatch(index, step, self._first_sample(index), loaded)

        return microbatch

    def _fields(self, dataset: RunSamples, consumed: int, index: int) -> dict[str, Tensor]:
        first = consumed + self._first_sample(index)
        positions = range(first, first + self._train.micro_batch_size)
        return SampleStream(dataset, self._train.seed, self._cut).fields(positions, self._names, self._device)

    def _first_sample(self, index: int) -> int:
        """Return a microbatch's first index in the global batch. Data-parallel ranks take microbatches in turn."""
        return (index * self._data_size + self._data_rank) * self._train.micro_batch_size
