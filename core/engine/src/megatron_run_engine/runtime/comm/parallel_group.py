"""The ranks that share one layer and their collectives, as an object that is passed to the layer."""

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


#: The activity of a wait that is not recorded.
_UNRECORDED: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Pending:
    """A tensor that a collective is filling. ``phase`` records the wait as this rank's activity."""

    tensor: Tensor
    work: dist.Work | Messages | None = None
    phase: AbstractContextManager[None] = _UNRECORDED

    def wait(self) -> Tensor:
        """Wait for the collective and return the tensor."""
        if self.work is not None:
            with self.phase:
                self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class ParallelGroup:
    """The ranks that share one layer: this rank's ``index`` among ``size`` ranks, and their collectives.

    A split layer gets it as an argument and looks up no group. The collectives of a single rank are no-ops. Several
    ranks without a ``group`` occur while a model is planned on the meta device: they cannot communicate. ``activity``
    records the collectives with ``scope``.
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
        """Return the peers' parts one after the other, an all-gather: [n, ...] -> [size * n, ...]."""
        return self.start_gather(part).wait()

    def start_gather(self, part: Tensor) -> Pending:
        """Start to :meth:`gather`. ``part`` must not change meanwhile."""
        if not self._several:
            return Pending(part)
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        gather = _collective("all_gather")
        return self._start("all-gather", whole, lambda: gather(whole, part.contiguous(), **self._async))

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sum over the peers, a reduce-scatter: [size * n, ...] -> [n, ...]."""
        return self.start_scatter_sum(whole).wait()

    def start_scatter_sum(self, whole: Tensor) -> Pending:
        """Start to :meth:`scatter_sum`. ``whole`` must not change meanwhile."""
        if not self._several:
            return Pending(whole)
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        scatter = _collective("reduce_scatter")
        return self._start("reduce-scatter", part, lambda: scatter(part, whole.contiguous(), **self._async))

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange rows with every peer, an all-to-all. Rows are sorted by peer on both sides.

        ``send[r]`` of ``rows`` [sum(send), ...] go to peer r. Returns [sum(receive), ...], ``receive[r]`` from peer r.
        """
        if not self._several:
            return rows
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        with self.activity.collective("all-to-all", self.scope, 0):  # 0: the sizes differ by peer
            dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=self.group)
        return received

    def start_sum_shares(self, flat: Tensor, shares: Sequence[range]) -> Pending:
        """Start to sum ``flat`` over the peers, in place: peer r gets the sum in its ``shares[r]``.

        The shares are equal and in order (a reduce-scatter), or one peer's share is all of ``flat`` (a reduce). Outside
        its own share a peer's values are undefined afterwards.
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
        """Start to fill ``flat``, of which peer r holds ``shares[r]``, on every peer: the inverse of the sum."""
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
        """Whether there are other ranks."""
        # Without this check a missing group would silently mean the whole world to torch.
        assert self.size == 1 or self.group is not None, f"{self.size} ranks share this layer, and have no group"
        return self.size > 1


#: A single rank, which shares its layers with no other.
ALONE = ParallelGroup()


def _owner(shares: Sequence[range]) -> int | None:
    """Return the one peer whose share is not empty, or None if the shares are equal."""
    holders = [index for index, share in enumerate(shares) if share]
    return holders[0] if len(holders) == 1 else None


def _collective(name: Literal["all_gather", "reduce_scatter"]) -> Callable[..., dist.Work | None]:
    """Return the single-tensor version of a collective."""
    # torch 2.13 renamed both, and warns about the older names, the only ones that 2.9 has.
    found: Callable[..., dist.Work | None] | None = getattr(dist, f"{name}_single", None)
    return found or getattr(
        dist, {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
    )
