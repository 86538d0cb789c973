"""The rank grid: coordinates of ranks, and groups along each axis. Pure arithmetic, no torch and no globals.

Legend: T tensor, E expert, D data, P pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_run.errors import InputError

#: Axes of groups: `tensor`, `data` and `pipeline`, from the fastest-varying to the slowest, and others. `expert` and
#: `expert_data` split `data`; `tie` joins the stages at the ends of the pipeline.
Axis = Literal["tensor", "data", "pipeline", "expert", "expert_data", "tie"]
#: Where a collective runs: along one axis, or over every rank.
Scope = Axis | Literal["world"]
#: Axes whose ranks may hold the same parameter; an expert's parameters are on fewer ranks (``expert_data``).
Replicas = Literal["data", "expert_data"]


@dataclass(frozen=True)
class Sizes:
    """Size of each axis. ``expert`` divides ``data``: experts are split over data-parallel ranks."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.data % self.expert:
            raise InputError(
                f"parallel.expert={self.expert} does not divide the data-parallel size {self.data}",
                fix="set parallel.expert=1" if self.data == 1 else f"choose a divisor of {self.data}",
            )

    @property
    def world(self) -> int:
        """Number of ranks: T*D*P."""
        return self.tensor * self.data * self.pipeline


@dataclass(frozen=True)
class Topology:
    """One rank's view of the grid. The order is ``tp-ep-dp-pp``, leftmost fastest, as in Megatron-LM.

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
    def data_rank(self) -> int:
        """Index within the data-parallel group."""
        return self.rank // self.sizes.tensor % self.sizes.data

    @property
    def expert_rank(self) -> int:
        """Index within the expert-parallel group, the fast part of the data axis."""
        return self.data_rank % self.sizes.expert

    @property
    def stage(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.rank // (self.sizes.world // self.sizes.pipeline)

    def rank_at(self, *, tensor: int, data: int, stage: int) -> int:
        """The rank at these coordinates."""
        return tensor + self.sizes.tensor * (data + self.sizes.data * stage)

    def peers(self, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one only in their coordinate along ``axis``, in order.

        Along ``tie`` they are the stages at the ends of the layout, which may hold copies of one tied parameter.
        """
        here = {
            "tensor": self.tensor_rank,
            "data": self.data_rank,
            "stage": self.stage,
        }
        expert_size = self.sizes.expert
        group = self.data_rank - self.expert_rank
        along: dict[str, tuple[str, list[int]]] = {
            "tensor": ("tensor", list(range(self.sizes.tensor))),
            "data": ("data", list(range(self.sizes.data))),
            "pipeline": ("stage", list(range(self.sizes.pipeline))),
            "expert": ("data", list(range(group, group + expert_size))),
            "expert_data": ("data", list(range(self.expert_rank, self.sizes.data, expert_size))),
            "tie": ("stage", sorted(set(self.ends or (0, self.sizes.pipeline - 1)))),
        }
        coordinate, values = along[axis]
        return tuple(self.rank_at(**{**here, coordinate: value}) for value in values)

    def all_groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Every group along ``axis`` in the world, in the same order on all ranks."""
        groups = {Topology(self.sizes, rank, self.ends).peers(axis) for rank in range(self.sizes.world)}
        return tuple(sorted(groups))
