"""This project's layers on samples in pieces, by each method; whole, and split by heads, beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.context.peers.torch import TorchRing
from benchmarks.support.gpt import gpt_options, train_section
from benchmarks.support.shape import Shape
from benchmarks.tensor_parallel.model import Batch
from benchmarks.tensor_parallel.ours import OurStep, Ranks
from megatron_run.contracts import ParallelLayers
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_parallel_layer_context import Options, megatron_run_create_parallel_layer
from megatron_run_parallel_layer_tensor import Options as TensorOptions
from megatron_run_parallel_layer_tensor import megatron_run_create_parallel_layer as create_tensor_layer
from megatron_run_testing.build_contexts import context_at

METHODS = ("ring", "all_gather", "ulysses")


@dataclass(frozen=True)
class Sample:
    """What is computed: ``shape``, ``kv_heads`` of its heads, in ``dtype``."""

    shape: Shape
    kv_heads: int | None = None
    dtype: torch.dtype = torch.float32

    def step(
        self,
        topology: Topology,
        groups: Groups,
        make: Callable[[BuildContext], ParallelLayers],
        *,
        sequence: bool = False,
    ) -> OurStep:
        """A step with the layers that ``make`` makes."""
        options = gpt_options(self.shape).model_copy(update={"num_kv_heads": self.kv_heads})
        train = train_section(self.shape)
        context = context_at(topology, groups, options, sequence=sequence, dtype=self.dtype, train=train)
        return OurStep(self.shape, Batch(self.shape), context, make(context))


class Grids:
    """The ranks in a row along ``context``, and in a row along ``tensor``, with their groups. Collective."""

    def __init__(self) -> None:
        self.context = Ranks(Sizes(context=dist.get_world_size()))
        self.tensor = Ranks()


def dense(sample: Sample) -> OurStep:
    """Whole samples on one rank."""
    return sample.step(Topology(Sizes(), 0), Groups(), DenseLayers)


def pieces(sample: Sample, ranks: Ranks, method: str) -> OurStep:
    """Pieces of samples on all ranks, which meet by ``method``."""
    options = Options.model_validate({"method": method})

    def make(context: BuildContext) -> ParallelLayers:
        return megatron_run_create_parallel_layer(context, options, DenseLayers(context))

    return sample.step(ranks.topology, ranks.groups, make)


def torch_ring(sample: Sample, ranks: Ranks) -> OurStep:
    """The same pieces and layers, but torch's ring as the attention."""
    return sample.step(ranks.topology, ranks.groups, lambda context: TorchRing(DenseLayers(context)))


def split(sample: Sample, ranks: Ranks) -> OurStep:
    """Layers split over all ranks, with sequence parallelism."""
    return sample.step(
        ranks.topology, ranks.groups, lambda context: create_tensor_layer(context, TensorOptions()), sequence=True
    )
