"""Process groups by axis, as an object that is handed down.

A group of one rank is no group: its collectives do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

import torch.distributed as dist

from megatron_run.topology import Axis

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from megatron_run.topology import Topology

#: Where a collective runs: along one axis, or over every rank.
Scope = Axis | Literal["world"]
#: Axes that get process groups, in the one order in which every rank creates them.
_AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True)
class Channels:
    """The two communicators of pipeline messages: ``up`` to higher stages, ``down`` to lower ones.

    Two, so that on NCCL an activation and a gradient between the same pair of ranks cannot wait for each other.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup


@dataclass(frozen=True)
class Groups:
    """This rank's process groups. An axis of one rank is missing from ``by_axis``."""

    by_axis: Mapping[Axis, dist.ProcessGroup] = field(default_factory=dict)
    channels: Channels | None = None
    world: dist.ProcessGroup | None = None

    def group(self, scope: Scope) -> dist.ProcessGroup | None:
        """The group of ``scope``, or None when it is this rank alone."""
        return self.world if scope == "world" else self.by_axis.get(scope)

    def start_sum(self, tensor: Tensor, scope: Scope) -> dist.Work | None:
        """Start summing ``tensor`` in place over ``scope``; the handle to wait for, or None for a group of one."""
        group = self.group(scope)
        return None if group is None else dist.all_reduce(tensor, group=group, async_op=True)

    def sum_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Sum ``tensor`` in place over ``scope``."""
        group = self.group(scope)
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

    def max_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Take the maximum of ``tensor`` in place over ``scope``."""
        group = self.group(scope)
        if group is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return tensor

    def broadcast_(self, tensor: Tensor, source: int, scope: Scope) -> Tensor:
        """Copy global rank ``source``'s ``tensor`` to every rank of ``scope``, in place."""
        group = self.group(scope)
        if group is not None:
            dist.broadcast(tensor, source, group=group)
        return tensor


def create_groups(topology: Topology, timeout: timedelta) -> Groups:
    """Create every group that ``topology`` needs. Collective: all ranks call it at the same point."""
    if topology.sizes.world == 1:
        return Groups()
    by_axis: dict[Axis, dist.ProcessGroup] = {}
    for axis in _AXES:
        mine = _create_along(topology, axis, timeout)
        if mine is not None:
            by_axis[axis] = mine
    up, down = (_create_along(topology, "pipeline", timeout) for _ in range(2))
    channels = Channels(up, down) if up is not None and down is not None else None
    return Groups(by_axis, channels, dist.group.WORLD)


def _create_along(topology: Topology, axis: Axis, timeout: timedelta) -> dist.ProcessGroup | None:
    """Create all groups along ``axis`` and return the one this rank is in, None for groups of one rank."""
    mine = None
    for ranks in topology.all_groups(axis):
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timeout)
            mine = group if topology.rank in ranks else mine
    return mine
