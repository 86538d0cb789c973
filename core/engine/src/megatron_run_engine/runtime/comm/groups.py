"""A rank's process groups by axis, as an object that is handed down."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from megatron_run.contracts.activity import Activity
from megatron_run.contracts.topology import Axis
from megatron_run_engine.runtime.comm.parallel_group import ParallelGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from megatron_run.contracts.topology import Topology


#: Where a collective runs: along one axis, or over every rank.
Scope = Axis | Literal["world"]


@dataclass(frozen=True)
class Channels:
    """The two communicators of pipeline messages: ``up`` to higher stages, ``down`` to lower ones.

    Two, so that on NCCL an activation and a gradient between the same pair of ranks cannot wait for each other. A
    message that takes longer than ``timeout`` is an error.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup
    timeout: timedelta


@dataclass(frozen=True)
class Groups:
    """This rank's process groups; an axis of one rank is missing from ``by_axis``. ``phases`` is told what they do."""

    by_axis: Mapping[Axis, dist.ProcessGroup] = field(default_factory=dict)
    channels: Channels | None = None
    world: dist.ProcessGroup | None = None
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)

    def group(self, scope: Scope) -> dist.ProcessGroup | None:
        """The group of ``scope``, or None when it is this rank alone."""
        return self.world if scope == "world" else self.by_axis.get(scope)

    def peers(self, topology: Topology, axis: Axis) -> ParallelGroup:
        """The ranks along ``axis`` with this one, as a layer that is split over them wants them."""
        members = topology.peers(axis)
        return ParallelGroup(members.index(topology.rank), len(members), self.by_axis.get(axis), axis, self.activity)

    def sum_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Sum ``tensor`` in place over ``scope``."""
        group = self.group(scope)
        if group is not None:
            with self.activity.collective("all-reduce", scope, tensor.numel()):
                dist.all_reduce(tensor, group=group)
        return tensor

    def max_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Take the maximum of ``tensor`` in place over ``scope``."""
        group = self.group(scope)
        if group is not None:
            with self.activity.collective("all-reduce", scope, tensor.numel()):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return tensor

    def broadcast_(self, tensor: Tensor, source: int, scope: Scope) -> Tensor:
        """Copy global rank ``source``'s ``tensor`` to every rank of ``scope``, in place."""
        group = self.group(scope)
        if group is not None:
            with self.activity.collective("broadcast", scope, tensor.numel()):
                dist.broadcast(tensor, source, group=group)
        return tensor

    def gather_(self, tensor: Tensor, found: list[Tensor] | None) -> None:
        """Bring every rank's ``tensor`` into rank 0's ``found``, one for each rank of the world; None elsewhere."""
        with self.activity.collective("gather", "world", tensor.numel()):
            dist.gather(tensor, found, dst=0, group=self.world)

    def gather_names(self, names: Sequence[str], device: torch.device) -> list[list[str]]:
        """Every rank's ``names``, by rank, through memory of ``device``; a name holds no new line."""
        if self.world is None:
            return [list(names)]
        text = torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8, device=device)
        longest = int(self.max_(torch.tensor([len(text)], device=device), "world"))
        rows = text.new_zeros(dist.get_world_size(self.world), longest)
        rows[dist.get_rank(self.world), : len(text)] = text
        found = (bytes(row).rstrip(b"\0").decode() for row in self.sum_(rows, "world").tolist())
        return [each.split("\n") if each else [] for each in found]
