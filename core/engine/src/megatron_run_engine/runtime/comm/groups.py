"""A rank's process groups by axis, as an object that is passed down instead of global groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist

from megatron_run.contracts.activity import Activity
from megatron_run.contracts.topology import Axis
from megatron_run_engine.runtime.comm.parallel_group import ParallelGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from torch import Tensor

    from megatron_run.contracts.topology import Topology


#: Where a collective runs: along one axis, or over every rank.
Scope = Axis | Literal["world"]


@dataclass(frozen=True)
class Channels:
    """The two communicators of pipeline messages: ``up`` to higher stages, ``down`` to lower ones.

    There are two, since NCCL serialises the messages of a communicator: an activation and a gradient between the same
    two ranks would wait for each other. A message that takes longer than ``timeout`` is an error.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup
    timeout: timedelta


@dataclass(frozen=True)
class Groups:
    """This rank's process groups. ``by_axis`` omits axes of one rank. ``activity`` records their collectives."""

    by_axis: Mapping[Axis, dist.ProcessGroup] = field(default_factory=dict)
    channels: Channels | None = None
    world: dist.ProcessGroup | None = None
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)

    def group(self, scope: Scope) -> dist.ProcessGroup | None:
        """Return the group of ``scope``, or None if it is this rank alone."""
        return self.world if scope == "world" else self.by_axis.get(scope)

    def peers(self, topology: Topology, axis: Axis) -> ParallelGroup:
        """Return the ranks along ``axis`` with this one, for a layer that is split over them."""
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
        """Gather every rank's ``tensor`` into rank 0's ``found``, one per rank. ``found`` is None elsewhere."""
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


#: The groups along an axis: which ranks belong together.
Partition = tuple[tuple[int, ...], ...]
#: Axes that get process groups, in the one order in which every rank creates them; ``tie`` is the last.
_AXES: tuple[Axis, ...] = get_args(Axis)


def patience(timeout: float) -> float:
    """Return the seconds after which a collective fails, if the watchdog ends a rank that hangs for ``timeout``.

    It is longer than the watchdog's limit, so that a rank that is slow first and then hangs is named by the watchdog.
    The collectives that wait for it know only that something is late.
    """
    return 2 * timeout + 10


def create_groups(topology: Topology, timeout: timedelta, activity: Activity | None = None) -> Groups:
    """Create every group that ``topology`` needs. Collective: all ranks call it at the same point.

    ``activity`` records their collectives, and learns the members of each. Axes with the same partition of the ranks
    share one group.
    """
    # The tie comes last. It leaves ranks out, and torch names a group that only its members create by the number of
    # groups that they have created before, which must be equal on all members of every later group.
    activity = Activity() if activity is None else activity
    if topology.sizes.world == 1:
        return Groups(activity=activity)
    activity.members["world"] = tuple(range(topology.sizes.world))
    made: dict[Partition, dist.ProcessGroup | None] = {}
    by_axis: dict[Axis, dist.ProcessGroup] = {}
    channels: Channels | None = None
    for axis in _AXES:
        if axis == "tie":
            channels = _create_channels(topology, timeout)
        partition = topology.all_groups(axis)
        if partition not in made:
            made[partition] = _create(partition, topology.rank, timeout)
        group = made[partition]
        if group is not None and topology.rank in topology.peers(axis):
            by_axis[axis] = group
            activity.members[axis] = topology.peers(axis)
    return Groups(by_axis, channels, dist.group.WORLD, activity)


def create_aside(size: int, timeout: timedelta, activity: Activity) -> Groups:
    """Create a second group of the world, over gloo on the host, for a thread that runs concurrently with the training.

    ``activity`` is the thread's. Collective: all ranks call it at the same point.
    """
    world = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
    return Groups(world=world, activity=activity)


def _create_channels(topology: Topology, timeout: timedelta) -> Channels | None:
    partition = topology.all_groups("pipeline")
    up, down = (_create(partition, topology.rank, timeout) for _ in range(2))
    return Channels(up, down, timeout) if up is not None and down is not None else None


def _create(partition: Partition, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Create the groups of ``partition`` and return the one with ``rank``, None if that has one member or none."""
    # On gloo only the members create a group. NCCL splits a communicator, which all ranks of the world take part in.
    members_only = dist.get_backend() == "gloo"
    mine = None
    for ranks in partition:
        if len(ranks) > 1 and (rank in ranks or not members_only):
            group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=members_only)
            mine = group if rank in ranks else mine
    return mine
