"""Process groups by axis, as an object that is handed down.

A group of one rank is no group: its collectives do nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from megatron_run import gloo
from megatron_run.phases import Phases
from megatron_run.topology import Axis

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from megatron_run.gloo import Messages
    from megatron_run.topology import Topology


#: The phase of a wait that nobody is told of.
_UNSAID: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Pending:
    """A tensor that a collective is filling; ``phase`` is what this rank does while it waits for that."""

    tensor: Tensor
    work: dist.Work | Messages | None = None
    phase: AbstractContextManager[None] = _UNSAID

    def wait(self) -> Tensor:
        """The tensor, once it is whole."""
        if self.work is not None:
            with self.phase:
                self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class Peers:
    """The ranks that share one layer: this rank's ``index`` among ``size`` of them, and what they do together.

    A layer that is split takes them as an argument, and looks up no group. One rank alone is no group: its collectives
    do nothing. Several without a ``group`` know their places alone, as while a model is planned, and cannot talk. What
    they do is said to ``phases`` as done over ``scope``.
    """

    index: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    scope: str = ""
    phases: Phases = field(default_factory=Phases, compare=False, repr=False)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the peers, in place."""
        return self.start_sum(tensor).wait()

    def start_sum(self, tensor: Tensor) -> Pending:
        """Start to sum ``tensor`` over the peers, in place."""
        if not self._several:
            return Pending(tensor)
        return self._start("all-reduce", tensor, lambda: dist.all_reduce(tensor, **self._async))

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the maximum of ``tensor`` over the peers, in place."""
        if self._several:
            with self.phases.collective("all-reduce", self.scope, tensor.numel()):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, part: Tensor) -> Tensor:
        """The peers' parts, one after the other: [n, ...] -> [size * n, ...]."""
        return self.start_gather(part).wait()

    def start_gather(self, part: Tensor) -> Pending:
        """Start to :meth:`gather`; ``part`` must not change meanwhile."""
        if not self._several:
            return Pending(part)
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        gather = _collective("all_gather")
        return self._start("all-gather", whole, lambda: gather(whole, part.contiguous(), **self._async))

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over the peers, a reduce-scatter: [size * n, ...] -> [n, ...]."""
        return self.start_scatter_sum(whole).wait()

    def start_scatter_sum(self, whole: Tensor) -> Pending:
        """Start to :meth:`scatter_sum`; ``whole`` must not change meanwhile."""
        if not self._several:
            return Pending(whole)
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        scatter = _collective("reduce_scatter")
        return self._start("reduce-scatter", part, lambda: scatter(part, whole.contiguous(), **self._async))

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Each peer's rows to it, and here what each peer has for this one, an all-to-all, both in order of the peers.

        ``send[r]`` of ``rows`` [sum(send), ...] go to peer r, from which ``receive[r]`` come: [sum(receive), ...].
        """
        if not self._several:
            return rows
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        with self.phases.collective("all-to-all", self.scope, 0):  # each peer has another number of values
            dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=self.group)
        return received

    def start_sum_shares(self, flat: Tensor, shares: Sequence[range]) -> Pending:
        """Start to sum ``flat`` over the peers: peer r ends up with the sum of its ``shares[r]``, in place.

        The shares are equal, in order (a reduce-scatter), or one peer's is all of it. What a peer finds outside its own
        share is undefined.
        """
        if not self._several:
            return Pending(flat)
        owner = _owner(shares)
        if owner is not None:
            return self._start("reduce", flat, lambda: dist.reduce(flat, group_dst=owner, **self._async))
        if gloo.is_gloo(self.group):
            return self._start("sum of shares", flat, lambda: gloo.start_sum_shares(flat, shares, *self._place))
        scatter, mine = _collective("reduce_scatter"), flat[shares[self.index].start : shares[self.index].stop]
        return self._start("sum of shares", flat, lambda: scatter(mine, flat, **self._async))

    def start_gather_shares(self, flat: Tensor, shares: Sequence[range]) -> Pending:
        """Start to fill ``flat``, of which peer r holds ``shares[r]``, on every peer; shares as above."""
        if not self._several:
            return Pending(flat)
        owner = _owner(shares)
        if owner is not None:
            return self._start("broadcast", flat, lambda: dist.broadcast(flat, group_src=owner, **self._async))
        if gloo.is_gloo(self.group):
            return self._start("gather of shares", flat, lambda: gloo.start_gather_shares(flat, shares, *self._place))
        gather, mine = _collective("all_gather"), flat[shares[self.index].start : shares[self.index].stop]
        return self._start("gather of shares", flat, lambda: gather(flat, mine, **self._async))

    def _start(self, operation: str, result: Tensor, begin: Callable[[], dist.Work | Messages | None]) -> Pending:
        phase = self.phases.collective(operation, self.scope, result.numel())
        with phase:
            work = begin()
        return Pending(result, work, phase)

    @property
    def _async(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": True}

    @property
    def _place(self) -> tuple[int, dist.ProcessGroup | None]:
        return self.index, self.group

    @property
    def _several(self) -> bool:
        """Whether there is anybody to talk to. Torch would take a missing group for the whole world."""
        assert self.size == 1 or self.group is not None, f"{self.size} ranks share this layer, and have no group"
        return self.size > 1


#: One rank that shares with nobody.
ALONE = Peers()


def _owner(shares: Sequence[range]) -> int | None:
    """The one peer whose share is not empty; None where the shares are equal."""
    holders = [index for index, share in enumerate(shares) if share]
    return holders[0] if len(holders) == 1 else None


def _collective(name: Literal["all_gather", "reduce_scatter"]) -> Callable[..., dist.Work | None]:
    """The collective of one tensor into one: torch 2.13 renamed both, and warns about the names that 2.9 has."""
    found: Callable[..., dist.Work | None] | None = getattr(dist, f"{name}_single", None)
    return found or getattr(
        dist, {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
    )


#: Where a collective runs: along one axis, or over every rank.
Scope = Axis | Literal["world"]
#: The groups along an axis: which ranks belong together.
Partition = tuple[tuple[int, ...], ...]
#: Axes that get process groups, in the one order in which every rank creates them; ``tie`` is the last.
_AXES: tuple[Axis, ...] = get_args(Axis)


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
    phases: Phases = field(default_factory=Phases, compare=False, repr=False)

    def group(self, scope: Scope) -> dist.ProcessGroup | None:
        """The group of ``scope``, or None when it is this rank alone."""
        return self.world if scope == "world" else self.by_axis.get(scope)

    def peers(self, topology: Topology, axis: Axis) -> Peers:
        """The ranks along ``axis`` with this one, as a layer that is split over them wants them."""
        members = topology.peers(axis)
        return Peers(members.index(topology.rank), len(members), self.by_axis.get(axis), axis, self.phases)

    def sum_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Sum ``tensor`` in place over ``scope``."""
        group = self.group(scope)
        if group is not None:
            with self.phases.collective("all-reduce", scope, tensor.numel()):
                dist.all_reduce(tensor, group=group)
        return tensor

    def max_(self, tensor: Tensor, scope: Scope) -> Tensor:
        """Take the maximum of ``tensor`` in place over ``scope``."""
        group = self.group(scope)
        if group is not None:
            with self.phases.collective("all-reduce", scope, tensor.numel()):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return tensor

    def broadcast_(self, tensor: Tensor, source: int, scope: Scope) -> Tensor:
        """Copy global rank ``source``'s ``tensor`` to every rank of ``scope``, in place."""
        group = self.group(scope)
        if group is not None:
            with self.phases.collective("broadcast", scope, tensor.numel()):
                dist.broadcast(tensor, source, group=group)
        return tensor

    def gather_(self, tensor: Tensor, found: list[Tensor] | None) -> None:
        """Bring every rank's ``tensor`` into rank 0's ``found``, one for each rank of the world; None elsewhere."""
        with self.phases.collective("gather", "world", tensor.numel()):
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


def patience(timeout: float) -> float:
    """Seconds until a collective gives up by itself, where a rank that does nothing for ``timeout`` is ended.

    Long enough that a rank which is slow at first and hangs then is named by who watches it, and not by those that have
    waited for it all the time: they know only that something is late.
    """
    return 2 * timeout + 10


def create_groups(topology: Topology, timeout: timedelta, phases: Phases | None = None) -> Groups:
    """Create every group that ``topology`` needs. Collective: all ranks call it at the same point.

    ``phases`` hears of what is done with them, and learns who takes part.

    Axes that group the ranks alike share one group. The tie comes last: it leaves ranks out, and a group that its
    members make among themselves is named by how many its members have made before.
    """
    phases = Phases() if phases is None else phases
    if topology.sizes.world == 1:
        return Groups(phases=phases)
    phases.members["world"] = tuple(range(topology.sizes.world))
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
            phases.members[axis] = topology.peers(axis)
    return Groups(by_axis, channels, dist.group.WORLD, phases)


def create_aside(size: int, timeout: timedelta, phases: Phases) -> Groups:
    """The world once more, over gloo and on the host, for a thread that meets the other ranks beside the training.

    ``phases`` are those of the thread. Collective: all ranks call it at the same point.
    """
    world = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
    return Groups(world=world, phases=phases)


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
