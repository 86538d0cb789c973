"""Makes the process groups that a topology needs: every rank makes the same ones in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import torch.distributed as dist

from megatron_run.contracts.activity import Activity
from megatron_run.contracts.topology import Axis
from megatron_run_engine.runtime.comm.groups import Channels, Groups

if TYPE_CHECKING:
    from datetime import timedelta

    from megatron_run.contracts.topology import Topology

#: The groups along an axis: which ranks belong together.
Partition = tuple[tuple[int, ...], ...]
#: Axes that get process groups, in the one order in which every rank creates them; ``tie`` is the last.
_AXES: tuple[Axis, ...] = get_args(Axis)


def patience(timeout: float) -> float:
    """Seconds until a collective gives up by itself, where a rank that does nothing for ``timeout`` is ended.

    Long enough that a rank which is slow at first and hangs then is named by who watches it, and not by those that have
    waited for it all the time: they know only that something is late.
    """
    return 2 * timeout + 10


def create_groups(topology: Topology, timeout: timedelta, activity: Activity | None = None) -> Groups:
    """Create every group that ``topology`` needs. Collective: all ranks call it at the same point.

    ``phases`` hears of what is done with them, and learns who takes part.

    Axes that group the ranks alike share one group. The tie comes last: it leaves ranks out, and a group that its
    members make among themselves is named by how many its members have made before.
    """
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
    """The world once more, over gloo and on the host, for a thread that meets the other ranks beside the training.

    ``phases`` are those of the thread. Collective: all ranks call it at the same point.
    """
    world = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
    return Groups(world=world, activity=activity)


def _create_channels(topology: Topology, timeout: timedelta) -> Channels | None:
    partition = topology.all_groups("pipeline")
    up, down = (_create(partition, topology.rank, timeout) for _ in range(2))
    return Channels(up, down, timeout) if up is not None and down is not None else None


def _create(partition: Partition, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Create the groups of ``partition`` and return the one ``rank`` is in, None for a group of one or none at all.

    On gloo only its members make a group. NCCL splits communicators, in which the whole world takes part.
    """
    members_only = dist.get_backend() == "gloo"
    mine = None
    for ranks in partition:
        if len(ranks) > 1 and (rank in ranks or not members_only):
            group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=members_only)
            mine = group if rank in ranks else mine
    return mine
