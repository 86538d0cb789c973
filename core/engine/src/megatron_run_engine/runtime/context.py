"""The engine's :class:`megatron_run.contracts.BuildContext`: what that promises, and what the engine's parts need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts.pieces import Pieces

if TYPE_CHECKING:
    import logging

    from pydantic import BaseModel

    from megatron_run.contracts.schema import RunSection, TrainSection
    from megatron_run.contracts.topology import Topology
    from megatron_run_engine.runtime.comm import Groups
    from megatron_run_engine.runtime.gradients import GradientAccumulator
    from megatron_run_engine.runtime.metrics import Metrics
    from megatron_run_engine.runtime.rng import RandomStreams
    from megatron_run_engine.runtime.segments import SegmentRunner


def planned_device(run: RunSection, ranks: int) -> torch.device:
    """The kind of device that ``ranks`` get which start here, or ask for where it is missing."""
    # To count devices starts nothing on a GPU.
    gpus = run.device == "cuda" or (run.device == "auto" and torch.cuda.device_count() >= ranks)
    return torch.device("cuda" if gpus else "cpu")


@dataclass(frozen=True)
class Dtypes:
    """``param``: type of parameters and activations. ``main``: type of master weights and of their update, fp32.

    ``main_grad`` has the type ``main`` unless the optimizer's option ``grad_dtype`` is ``param``.
    """

    param: torch.dtype
    main: torch.dtype


@dataclass(frozen=True)
class BuildContext:
    """Passed to every factory except those of pure data (schedule, data, observer).

    ``topology`` is this rank's place in the grid, and ``groups`` its process groups by axis. ``model`` is the model
    plugin's options with the vocabulary size filled in; ``train`` and ``run`` are sections of the configuration.
    ``gradients`` takes weight gradients, ``rng`` positions random streams, ``metrics`` creates meters for numbers to
    report, and ``segments`` runs the segments of layers, eagerly or from a captured graph. ``sequence_shards`` is the
    number of ranks that split the sequence between blocks: the tensor-parallel size under sequence parallelism, else 1.
    ``fields`` are the names of the fields that the data's samples have (:meth:`megatron_run.contracts.Model.fields`).
    ``lends``: parameters are built without memory, which their optimizer gives them.
    """

    topology: Topology
    groups: Groups
    device: torch.device
    dtypes: Dtypes
    model: BaseModel
    train: TrainSection
    run: RunSection
    gradients: GradientAccumulator
    rng: RandomStreams
    metrics: Metrics
    segments: SegmentRunner
    log: logging.Logger
    sequence_shards: int = 1
    fields: frozenset[str] = frozenset({"tokens", "labels", "loss_mask"})
    lends: bool = False

    @property
    def pieces(self) -> Pieces:
        """The pieces of each sample that this rank holds."""
        return Pieces(self.topology.context_rank, self.topology.sizes.context)

    @property
    def trains_on(self) -> torch.device:
        """``device`` or, while a run is planned on the meta device, :func:`planned_device`."""
        if self.device.type != "meta":
            return self.device
        return planned_device(self.run, self.topology.sizes.world)

    @property
    def vocab_size(self) -> int:
        """Token ids of the model, unpadded. Raises ValueError while its options do not say."""
        size: int | None = self.model.vocab_size  # type: ignore[attr-defined]  # every model's options have it
        if size is None:
            raise ValueError("vocab_size is unset: fill it in from the data first")
        return size
