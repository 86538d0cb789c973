"""The rank grid: coordinates of ranks, and groups along each axis. Pure arithmetic, no torch and no globals.

Legend: T tensor, C context, E expert, D data, P pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from megatron_run.errors import InputError

#: Axes of groups. Ranks along `tensor` split layers, along `context` the tokens of a sample, along `pipeline` the
#: layers' order, and along `expert` experts. `replicas` are the ranks that hold the same parameters, context x data:
#: those of other samples and of other pieces of the same. `expert_replicas` hold the same experts. `tie` joins the
#: stages at the ends of the pipeline.
Axis = Literal["tensor", "context", "replicas", "pipeline", "expert", "expert_replicas", "tie"]
#: Where a collective runs: along one axis, or over every rank.
Scope = Axis | Literal["world"]
#: Axes whose ranks may hold the same parameter; an expert's parameters are on fewer ranks (``expert_replicas``).
Replicas = Literal["replicas", "expert_replicas"]


@dataclass(frozen=True)
class Sizes:
    """Size of each axis. ``expert`` divides ``data``: experts are split over data-parallel ranks."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        if self.data % self.expert:
            raise InputError(
                f"parallel.expert={self.expert} does not divide the data-parallel size {self.data}",
                fix="set parallel.expert=1" if self.data == 1 else f"choose a divisor of {self.data}",
            )

    @property
    def world(self) -> int:
        """Number of ranks: T*C*D*P."""
        return self.tensor * self.context * self.data * self.pipeline


@dataclass(frozen=True)
class Topology:
    """One rank's view of the grid. The order is ``tp-cp-ep-dp-pp``, leftmost fastest, as in Megatron-LM.

    ``ends`` are the stages of the layout's first and last position, which may share a tied parameter. None means the
    first and the last stage.
    """

    sizes: Sizes
    rank: int
    ends: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.sizes.world:
            raise ValueError(f"rank {self.rank} is outside a world of {self.sizes.world}")

    @property
    def tensor_rank(self) -> int:
        """Index within the tensor-parallel group."""
        return self.rank % self.sizes.tensor

    @property
    def context_rank(self) -> int:
        """Index within the context-parallel group."""
        return self.rank // self.sizes.tensor % self.sizes.context

    @property
    def data_rank(self) -> int:
        """Index among the ranks that read other samples."""
        return self.rank // (self.sizes.tensor * self.sizes.context) % self.sizes.data

    @property
    def expert_rank(self) -> int:
        """Index within the expert-parallel group, the fast part of the data axis."""
        return self.data_rank % self.sizes.expert

    @property
    def stage(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.rank // (self.sizes.world // self.sizes.pipeline)

    def rank_at(self, *, tensor: int = 0, context: int = 0, data: int = 0, stage: int = 0) -> int:
        """The rank at these coordinates."""
        sizes = self.sizes
        return tensor + sizes.tensor * (context + sizes.context * (data + sizes.data * stage))

    def peers(self, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one only in their coordinates along ``axis``, in ascending order.

        Along ``tie`` they are the stages at the ends of the layout, which may hold copies of one tied parameter.
        """
        sizes, mate = self.sizes, self.data_rank - self.expert_rank
        pieces, ends = range(sizes.context), self.ends or (0, sizes.pipeline - 1)
        along: dict[Axis, dict[str, Iterable[int]]] = {
            "tensor": {"tensor": range(sizes.tensor)},
            "context": {"context": pieces},
            "replicas": {"context": pieces, "data": range(sizes.data)},
            "pipeline": {"stage": range(sizes.pipeline)},
            "expert": {"data": range(mate, mate + sizes.expert)},
            "expert_replicas": {"context": pieces, "data": range(self.expert_rank, sizes.data, sizes.expert)},
            "tie": {"stage": set(ends)},
        }
        here = {"tensor": self.tensor_rank, "context": self.context_rank, "data": self.data_rank, "stage": self.stage}
        places = product(*({name: [index] for name, index in here.items()} | along[axis]).values())
        return tuple(sorted(self.rank_at(**dict(zip(here, place, strict=True))) for place in places))

    def all_groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Every group along ``axis`` in the world, in the same order on all ranks."""
        groups = {Topology(self.sizes, rank, self.ends).peers(axis) for rank in range(self.sizes.world)}
        return tuple(sorted(groups))
