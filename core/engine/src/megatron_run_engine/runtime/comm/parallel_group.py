"""The ranks that share one layer, and their collectives, as an object passed to the layer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from megatron_run.contracts.activity import Activity
from megatron_run_engine.runtime.comm import gloo
from megatron_run_engine.runtime.comm.gloo import start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from megatron_run_engine.runtime.comm.gloo import Waitable


#: The phase of a wait that is not recorded.
_UNRECORDED: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Pending:
    """A tensor that a collective is filling; ``phase`` is this rank's activity while it waits for it."""

    tensor: Tensor
    work: Waitable | None = None
    phase: AbstractContextManager[None] = _UNRECORDED

    def wait(self) -> Tensor:
        """Block until the tensor is complete, and return it."""
        if self.work is not None:
            with self.phase:
                self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class ParallelGroup:
    """The ranks that share one layer: this rank's ``index`` among ``size`` of them, and their collectives.

    A split layer takes it as an argument and looks up no group. With ``size`` 1 the collectives return their input.
    With ``size`` above 1 and no ``group``, as while a run is planned, indices are known but collectives fail.
    ``activity`` records each collective under the name ``scope``.
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
        """Start summing ``tensor`` over the peers, in place."""
        if not self._several:
            return Pending(tensor)
        return self._start("all-reduce", partial(dist.all_reduce, **self._async), tensor)

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the maximum of ``tensor`` over the peers, in place."""
        if self._several:
            with self.activity.collective("all-reduce", self.scope, tensor.numel()):
                copied = start(partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=self.group), self.group, tensor)
            Pending(tensor, copied).wait()
        return tensor

    def gather(self, part: Tensor) -> Tensor:
        """Concatenate the peers' parts, an all-gather: [n, ...] -> [size * n, ...]."""
        return self.start_gather(part).wait()

    def start_gather(self, part: Tensor) -> Pending:
        """Start to :meth:`gather`; ``part`` must not change meanwhile."""
        if not self._several:
            return Pending(part)
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        return self._start("all-gather", partial(_collective("all_gather"), **self._async), whole, part.contiguous())

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over the peers, a reduce-scatter: [size * n, ...] -> [n, ...]."""
        return self.start_scatter_sum(whole).wait()

    def start_scatter_sum(self, whole: Tensor) -> Pending:
        """Start to :meth:`scatter_sum`; ``whole`` must not change meanwhile."""
        if not self._several:
            return Pending(whole)
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        scatter = partial(_collective("reduce_scatter"), **self._async)
        return self._start("reduce-scatter", scatter, part, whole.contiguous())

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange rows with every peer, an all-to-all: rows [sum(send), ...] -> [sum(receive), ...].

        ``send[r]`` rows go to peer r and ``receive[r]`` rows come from it, both in the order of the peers.
        """
        if not self._several:
            return rows
        received = rows.new_empty((sum(receive), *rows.shape[1:]))

        def begin(received: Tensor, rows: Tensor) -> dist.Work | None:
            work: dist.Work | None = dist.all_to_all_single(received, rows, list(receive), list(send), group=self.group)
            return work

        with self.activity.collective("all-to-all", self.scope, 0):  # 0: the number of values differs between peers
            copied = start(begin, self.group, received, rows.contiguous())
        return Pending(received, copied).wait()

    def start_pass_on(self, part: Tensor) -> Pending:
        """Start sending ``part`` to the next peer, the last to the first, and receiving that of the one before.

        ``part`` must not change meanwhile.
        """
        if not self._several:
            return Pending(part)
        # An exchange with two peers, and not two messages: compilers and graphs record collectives alone.
        send, receive = (
            [int(peer == (self.index + step) % self.size) for peer in range(self.size)] for step in (1, -1)
        )
        begin = partial(
            dist.all_to_all_single, output_split_sizes=receive, input_split_sizes=send, group=self.group, async_op=True
        )
        pending = self._start("pass on", begin, part.new_empty((1, *part.shape)), part.contiguous()[None])
        return replace(pending, tensor=pending.tensor[0])

    def start_sum_shares(self, flat: Tensor, shares: Sequence[range]) -> Pending:
        """Start summing ``flat`` over the peers, in place: peer r gets the sum in its ``shares[r]``.

        Shares are either equal and in order (a reduce-scatter), or one peer has all of it (a reduce). Values outside a
        peer's own share are undefined afterwards.
        """
        if not self._several:
            return Pending(flat)
        owner = _owner(shares)
        if owner is not None:
            return self._start("reduce", partial(dist.reduce, group_dst=owner, **self._async), flat)
        if gloo.is_gloo(self.group):
            summing = partial(gloo.start_sum_shares, shares=shares, index=self.index, group=self.group)
            return self._start("sum of shares", summing, flat)
        scatter, share = _collective("reduce_scatter"), slice(shares[self.index].start, shares[self.index].stop)
        return self._start("sum of shares", lambda flat: scatter(flat[share], flat, **self._async), flat)

    def start_gather_shares(self, flat: Tensor, shares: Sequence[range]) -> Pending:
        """Start filling ``flat`` on every peer; peer r holds ``shares[r]``, as in :meth:`start_sum_shares`."""
        if not self._several:
            return Pending(flat)
        owner = _owner(shares)
        if owner is not None:
            return self._start("broadcast", partial(dist.broadcast, group_src=owner, **self._async), flat)
        if gloo.is_gloo(self.group):
            gathering = partial(gloo.start_gather_shares, shares=shares, index=self.index, group=self.group)
            return self._start("gather of shares", gathering, flat)
        gather, share = _collective("all_gather"), slice(shares[self.index].start, shares[self.index].stop)
        return self._start("gather of shares", lambda flat: gather(flat, flat[share], **self._async), flat)

    def _start(self, operation: str, begin: Callable[..., Waitable | None], result: Tensor, *inputs: Tensor) -> Pending:
        phase = self.activity.collective(operation, self.scope, result.numel())
        with phase:
            work = start(begin, self.group, result, *inputs)
        return Pending(result, work, phase)  # the wait re-enters the phase: it is the same collective, counted once

    @property
    def _async(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": True}

    @property
    def _several(self) -> bool:
        """Whether there are other peers."""
        # torch would take a missing group for the whole world, and hang or compute a wrong sum.
        assert self.size == 1 or self.group is not None, (
            f"{self.size} ranks share this layer, but have no process group"
        )
        return self.size > 1


#: A group of one rank.
ALONE = ParallelGroup()


def _owner(shares: Sequence[range]) -> int | None:
    """The only peer with a non-empty share, or None if the shares are equal."""
    holders = [index for index, share in enumerate(shares) if share]
    return holders[0] if len(holders) == 1 else None


def _collective(name: Literal["all_gather", "reduce_scatter"]) -> Callable[..., dist.Work | None]:
    """The collective from one tensor into one; torch 2.13 renamed both, and deprecates the names that 2.9 has."""
    found: Callable[..., dist.Work | None] | None = getattr(dist, f"{name}_single", None)
    return found or getattr(
        dist, {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
    )
