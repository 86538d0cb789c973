"""Collectives that gloo lacks: a faster reduce-scatter and all-gather, from point-to-point sends, and tensors of a GPU.

gloo's own reduce-scatter moves as many bytes as an all-reduce, through copies of the whole tensor, and its all-gather
copies too. The sends below move only the bytes that are needed and copy none. Sums equal those of gloo's all-reduce bit
for bit, so that optimizers with different reductions train the same weights.

gloo reads and writes host memory. GPUs ask for it with ``run.backend=gloo``, so that ranks may share one. Of its
operations some copy a GPU's tensors themselves, some refuse them, and ``send`` would take the address for one of the
host. So all are copied here, on the stream of the caller, who waits for the copy to the host: made for tests and for
debugging, not for speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from megatron_run.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

#: Tags of the two operations: a sum may start on one rank while another has not yet waited for a gather.
_SUM, _GATHER = 1, 2


class Waitable(Protocol):
    """The handle of a collective that was started: ``dist.Work``, or a stand-in for it."""

    def wait(self) -> object:
        """Block until it is complete."""
        ...


class OnHost:
    """A collective that fills ``copy`` on the host; once it is complete, ``result`` gets the values."""

    def __init__(self, work: Waitable | None, copy: Tensor, result: Tensor) -> None:
        self._work, self._copy, self._result = work, copy, result

    def wait(self) -> None:
        """Block until the collective is complete, then copy."""
        if self._work is not None:
            self._work.wait()
        self._result.copy_(self._copy)


def passes_host(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether ``group`` carries tensors of ``device`` as copies on the host."""
    return device.type == "cuda" and dist.get_backend(group) == "gloo"


def start(
    begin: Callable[..., Waitable | None], group: dist.ProcessGroup | None, result: Tensor, *inputs: Tensor
) -> Waitable | None:
    """Call ``begin(result, *inputs)``, which starts a collective of ``group``; on host copies where gloo needs them.

    ``result`` is also read. Raises :class:`PluginError` while a CUDA graph is recorded: the copy to the host would not
    be part of it.
    """
    if not passes_host(result.device, group):
        return begin(result, *inputs)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise PluginError(
            "a CUDA graph cannot hold gloo's collectives",
            why="they compute on the host",
            fix="set run.backend=nccl, or choose --plugin graph-capture=none",
        )
    copy, *copies = (tensor.to("cpu", copy=True) for tensor in (result, *inputs))
    return OnHost(begin(copy, *copies), copy, result)


def is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether ``group`` uses gloo."""
    return dist.get_backend(group) == "gloo"


class Transfers:
    """Sends and receives in flight, and sums to compute once they have arrived; a stand-in for ``dist.Work``."""

    def __init__(self, group: dist.ProcessGroup | None, tag: int) -> None:
        self._group, self._tag = group, tag
        self._works: list[dist.Work] = []
        self._sums: list[tuple[Tensor, Tensor]] = []

    def swap(self, send: Tensor, receive: Tensor, peer: int) -> None:
        """Start sending ``send`` to the group's rank ``peer`` and receiving from it into ``receive``."""
        arriving = dist.irecv(receive, group=self._group, group_src=peer, tag=self._tag)
        leaving = dist.isend(send, group=self._group, group_dst=peer, tag=self._tag)
        self._works += [work for work in (arriving, leaving) if work is not None]

    def add(self, arriving: Tensor, total: Tensor) -> None:
        """Add ``arriving`` to ``total`` once it has arrived."""
        self._sums.append((arriving, total))

    def wait(self) -> None:
        """Block until all transfers are complete, then compute the sums. Raises as torch for a lost or late peer."""
        for work in self._works:
            work.wait()
        for arriving, total in self._sums:
            total.add_(arriving)
        self._works, self._sums = [], []


def start_sum_shares(
    flat: Tensor, shares: Sequence[range], index: int, group: dist.ProcessGroup | None
) -> Transfers | dist.Work | None:
    """Start summing ``flat`` in place, at least in the share of this rank, the ``index`` -th of the group.

    Two peers exchange each other's shares: half the bytes of an all-reduce, and the same sums, since a + b = b + a. The
    order of more than two terms would differ from that of gloo's all-reduce, so larger groups use the all-reduce.
    """
    if len(shares) != 2:
        work: dist.Work | None = dist.all_reduce(flat, group=group, async_op=True)
        return work
    own, other = flat[_slice(shares[index])], flat[_slice(shares[1 - index])]
    transfers, arriving = Transfers(group, _SUM), torch.empty_like(own)
    transfers.swap(other, arriving, 1 - index)
    transfers.add(arriving, own)
    return transfers


def start_gather_shares(
    flat: Tensor, shares: Sequence[range], index: int, group: dist.ProcessGroup | None
) -> Transfers:
    """Start filling ``flat`` in place with every peer's share; this rank, the ``index`` -th, holds its own already."""
    transfers, own = Transfers(group, _GATHER), flat[_slice(shares[index])]
    for peer, share in enumerate(shares):
        if peer != index:
            transfers.swap(own, flat[_slice(share)], peer)
    return transfers


def _slice(values: range) -> slice:
    return slice(values.start, values.stop)
