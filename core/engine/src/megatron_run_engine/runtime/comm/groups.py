"""A rank's process groups by axis, as an object passed to everything that communicates."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, get_args

import torch
import torch.distributed as dist

from megatron_run.contracts.activity import Activity
from megatron_run.contracts.topology import Axis, Scope
from megatron_run_engine.runtime.comm.gloo import passes_host, start
from megatron_run_engine.runtime.comm.parallel_group import ParallelGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from megatron_run.contracts.topology import Topology


@dataclass(frozen=True)
class Channels:
    """The two communicators of pipeline messages: ``up`` to higher stages, ``down`` to lower ones.

    There are two because NCCL runs the operations of one communicator in order: an activation and a gradient between
    the same two ranks could otherwise wait for each other. A message that takes longer than ``timeout`` is an error.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup
    timeout: timedelta


@dataclass(frozen=True)
class Groups:
    """This rank's process groups; ``by_axis`` omits axes of one rank. ``activity`` records their collectives."""

    by_axis: Mapping[Axis, dist.ProcessGroup] = field(default_factory=dict)
    channels: Channels | None = None
    world: dist.ProcessGroup | None = None
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)

    def group(self, scope: Scope) -> dist.ProcessGroup | None:
        """The group of ``scope``, or None if it is this rank alone."""
        return self.world if scope == "world" else self.by_axis.get(scope)

    def parallel_group(self, topology: Topology, axis: Axis) -> ParallelGroup:
        """The ranks along ``axis`` with this one, as an argument for layers that are split over them."""
        members = topology.peers(axis)
        return ParallelGroup(members.index(topology.rank), len(members), self.by_axis.get(axis), axis, self.activity)

    def sum_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Sum ``tensor`` in place over ``scope``."""
        group = self.group(scope)
        if group is not None:
            with self.activity.collective("all-reduce", scope, tensor.numel()):
                _finish(partial(dist.all_reduce, group=group), group, tensor)
        return tensor

    def max_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Take the maximum of ``tensor`` in place over ``scope``."""
        group = self.group(scope)
        if group is not None:
            with self.activity.collective("all-reduce", scope, tensor.numel()):
                _finish(partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=group), group, tensor)
        return tensor

    def broadcast_(self, tensor: Tensor, source: int, scope: Scope) -> Tensor:
        """Copy global rank ``source``'s ``tensor`` to every rank of ``scope``, in place."""
        group = self.group(scope)
        if group is not None:
            with self.activity.collective("broadcast", scope, tensor.numel()):
                _finish(partial(dist.broadcast, src=source, group=group), group, tensor)
        return tensor

    def gather_(self, tensor: Tensor, found: list[Tensor] | None) -> None:
        """Gather every rank's ``tensor`` on rank 0, in ``found``, one entry per rank; other ranks pass None."""
        sent, received = tensor, found
        if passes_host(tensor.device, self.world):
            sent, received = tensor.cpu(), None if found is None else [each.cpu() for each in found]
        with self.activity.collective("gather", "world", tensor.numel()):
            dist.gather(sent, received, dst=0, group=self.world)
        if found is not None and received is not None and received is not found:
            torch._foreach_copy_(found, received)

    def send(self, data: Tensor, target: int) -> None:
        """Send ``data``, bytes on the host, to global rank ``target``, and return when they have left."""
        dist.send(data, target, group=self.world)

    def receive(self, data: Tensor, source: int) -> None:
        """Fill ``data``, bytes on the host, with what global rank ``source`` sends."""
        dist.recv(data, source, group=self.world)

    def gather_names(self, names: Sequence[str], device: torch.device) -> list[list[str]]:
        """Every rank's ``names``, by rank, exchanged through tensors on ``device``; names contain no newlines.

        Not ``all_gather_object``, which pickles.
        """
        if self.world is None:
            return [list(names)]
        text = torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8, device=device)
        longest = int(self.max_(torch.tensor([len(text)], device=device), "world"))
        rows = text.new_zeros(dist.get_world_size(self.world), longest)
        rows[dist.get_rank(self.world), : len(text)] = text  # the other rows are zero, so a sum gathers
        found = (bytes(row).rstrip(b"\0").decode() for row in self.sum_(rows, "world").tolist())
        return [each.split("\n") if each else [] for each in found]


def _finish(begin: Callable[[Tensor], dist.Work | None], group: dist.ProcessGroup, tensor: Tensor) -> None:
    """Run the collective ``begin`` on ``tensor``. It returns when it is done, and nothing, so it needs no wait."""
    copied = start(begin, group, tensor)
    if copied is not None:
        copied.wait()


#: All groups along an axis, as ranks.
Partition = tuple[tuple[int, ...], ...]
#: Axes that get process groups, in the order in which every rank creates them; ``tie`` is the last.
_AXES: tuple[Axis, ...] = get_args(Axis)


def patience(timeout: float) -> float:
    """Seconds until a collective fails, in a run whose watchdog ends a rank without progress for ``timeout`` seconds.

    It is more than twice as long, so that even a rank that is slow first and then hangs is named by the watchdog before
    a collective fails on the ranks that wait for it: these know only that something is late.
    """
    return 2 * timeout + 10


def create_groups(topology: Topology, timeout: timedelta, activity: Activity | None = None) -> Groups:
    """Create every group that ``topology`` needs. Collective: all ranks call it at the same point.

    ``activity`` records the groups' members and collectives. Axes that partition the ranks identically share one group.

    The tie comes last, because it leaves ranks out: torch names a group that only its members create by the number of
    groups that they have created before, and this number must agree among the members of every later group.
    """
    activity = activity or Activity()
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
    """A second world group, over gloo on the host, for a background thread that communicates during the training.

    ``activity`` is the thread's. Collective: all ranks call it at the same point.
    """
    world = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
    return Groups(world=world, activity=activity)


def _create_channels(topology: Topology, timeout: timedelta) -> Channels | None:
    partition = topology.all_groups("pipeline")
    up, down = (_create(partition, topology.rank, timeout) for _ in range(2))
    return Channels(up, down, timeout) if up is not None and down is not None else None


def _create(partition: Partition, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Create the groups of ``partition``; return that of ``rank``, or None if it is alone or in none.

    On gloo only the members create a group. On NCCL a group is split off the world's communicator, which takes all
    ranks.
    """
    members_only = dist.get_backend() == "gloo"
    own = None
    for ranks in partition:
        if len(ranks) > 1 and (rank in ranks or not members_only):
            group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=members_only)
            own = group if rank in ranks else own
    return own
