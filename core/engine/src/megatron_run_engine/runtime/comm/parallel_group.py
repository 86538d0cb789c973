"""What the ranks that share one layer do together, as an object that is handed down."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from megatron_run.contracts.activity import Activity
from megatron_run_engine.runtime.comm import gloo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from megatron_run_engine.runtime.comm.gloo import Messages


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
class ParallelGroup:
    """The ranks that share one layer: this rank's ``index`` among ``size`` of them, and what they do together.

    A layer that is split takes them as an argument, and looks up no group. One rank alone is no group: its collectives
    do nothing. Several without a ``group`` know their places alone, as while a model is planned, and cannot talk. What
    they do is said to ``phases`` as done over ``scope``.
    """

    index: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    scope: str = ""
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)

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
            with self.activity.collective("all-reduce", self.scope, tensor.numel()):
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
        with self.activity.collective("all-to-all", self.scope, 0):  # each peer has another number of values
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
        phase = self.activity.collective(operation, self.scope, result.numel())
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
ALONE = ParallelGroup()


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
