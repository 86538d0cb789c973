"""Faster reduce-scatter and all-gather for gloo, from point-to-point messages.

gloo's reduce-scatter moves as many bytes as an all-reduce and copies the whole tensor, and its all-gather copies
too. The messages below move only what is needed and copy nothing. Sums equal those of gloo's all-reduce bit for bit, so
optimizers with different reductions compute the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: Tags tell the messages of both operations apart: a sum may start before a rank has waited for a gather.
_SUM, _GATHER = 1, 2


def is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether ``group`` uses gloo."""
    return dist.get_backend(group) == "gloo"


class Messages:
    """Messages in flight, and sums to compute once they have arrived."""

    def __init__(self, group: dist.ProcessGroup | None, tag: int) -> None:
        self._group, self._tag = group, tag
        self._works: list[dist.Work] = []
        self._sums: list[tuple[Tensor, Tensor]] = []

    def swap(self, send: Tensor, receive: Tensor, peer: int) -> None:
        """Start to send ``send`` to the group's rank ``peer``, and to receive its message into ``receive``."""
        arriving = dist.irecv(receive, group=self._group, group_src=peer, tag=self._tag)
        leaving = dist.isend(send, group=self._group, group_dst=peer, tag=self._tag)
        self._works += [work for work in (arriving, leaving) if work is not None]

    def add(self, arriving: Tensor, total: Tensor) -> None:
        """Add ``arriving`` to ``total`` once it has arrived."""
        self._sums.append((arriving, total))

    def wait(self) -> None:
        """Wait for all messages and compute the sums. Raises torch's error if a peer is lost or late."""
        for work in self._works:
            work.wait()
        for arriving, total in self._sums:
            total.add_(arriving)
        self._works, self._sums = [], []


def start_sum_shares(
    flat: Tensor, shares: Sequence[range], index: int, group: dist.ProcessGroup | None
) -> Messages | dist.Work | None:
    """Start to sum ``flat``, in place, at least in the share of this rank, the ``index`` -th of the group."""
    # Two peers swap the halves that the other one sums: half the bytes of an all-reduce. Three or more would add in
    # another order than gloo's all-reduce, and round differently, so they use that.
    if len(shares) != 2:
        work: dist.Work | None = dist.all_reduce(flat, group=group, async_op=True)
        return work
    mine, theirs = flat[_slice(shares[index])], flat[_slice(shares[1 - index])]
    messages, arriving = Messages(group, _SUM), torch.empty_like(mine)
    messages.swap(theirs, arriving, 1 - index)
    messages.add(arriving, mine)
    return messages


def start_gather_shares(flat: Tensor, shares: Sequence[range], index: int, group: dist.ProcessGroup | None) -> Messages:
    """Start to fill ``flat`` with every peer's share, in place. This rank is the ``index`` -th and has its own."""
    messages, mine = Messages(group, _GATHER), flat[_slice(shares[index])]
    for peer, share in enumerate(shares):
        if peer != index:
            messages.swap(mine, flat[_slice(share)], peer)
    return messages


def _slice(values: range) -> slice:
    return slice(values.start, values.stop)
