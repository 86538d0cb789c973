"""Moves tokens to the ranks that hold their experts, and back. Only here does the host read routing results.

Each of the p expert-parallel ranks holds e/p experts and its own tokens. A dispatcher gives this rank the rows for its
experts, sorted by expert, and returns the experts' results to the tokens' ranks (Lepikhin et al. 2020, "GShard",
section 3.2).

Legend: n tokens, h hidden, e experts, k experts of a token, p expert-parallel ranks, m rows of this rank's experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_run_engine.nn.moe.placement import add_rows, combine_rows, copy_rows, pad_rows
from megatron_run_engine.nn.parallel.mappings import gather_sequence, scatter_sequence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_run_engine.nn.spec import Dispatch
    from megatron_run_engine.runtime.comm import ParallelGroup


class Dispatcher(ABC):
    """Moves tokens between ``peers``, of which each holds an equal share of ``experts``.

    ``order``, ``place`` and ``counts`` are those of a :class:`~megatron_run_engine.nn.moe.placement.Placement`.
    ``routed`` [p, e], int64 on the CPU, says how many tokens of each rank each expert takes.
    """

    #: Names of the tensors that :meth:`dispatch` passes to :meth:`collect`, besides rows and ``routed``.
    carries: tuple[str, ...] = ()

    def __init__(self, peers: ParallelGroup, experts: int) -> None:
        self.peers = peers
        share = experts // peers.size
        self.held = range(peers.index * share, (peers.index + 1) * share)

    @abstractmethod
    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Tokens [n, h] and weights [n, k] -> rows [m, h], ``routed`` and the tensors named by ``carries``."""

    @abstractmethod
    def collect(self, made: Tensor, weights: Tensor, routed: Tensor, *carried: Tensor) -> Tensor:
        """Results of the experts, [m, h] -> input of :meth:`combine`. The number of tokens is that of ``weights``."""

    @abstractmethod
    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """Return the tokens' weighted sums over their experts, [n, h]."""

    def count(self, routed: Tensor) -> Tensor:
        """Return the number of rows of each expert of this rank, int64 on the CPU."""
        return self._mine(routed).sum(0)

    def _mine(self, routed: Tensor) -> Tensor:
        """Return the columns of this rank's experts: [p, e] -> [p, e/p]."""
        return routed[:, self.held.start : self.held.stop]

    def _routed(self, counts: Tensor) -> Tensor:
        """Return every rank's ``counts`` [e] on the CPU, [p, e]."""
        # The only copy to the host in a layer of experts, and the only place where the host waits for the device.
        return self.peers.gather(counts[None]).cpu()


class AllToAll(Dispatcher):
    """Sends each token only to the ranks of its experts, in two all-to-alls of unequal parts."""

    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Send copies of the tokens in the order of their experts, which is also the order of the ranks."""
        routed = self._routed(counts)
        send, receive = self._row_counts(routed)
        rows = _exchange(copy_rows(tokens, order, place, sum(send)), self.peers, send, receive)
        return _transposed(rows, self._mine(routed)), routed

    def collect(self, made: Tensor, weights: Tensor, routed: Tensor, *carried: Tensor) -> Tensor:
        """Send the results back: [m, h] -> [n*k, h] in this rank's ``order``, zeros for dropped assignments."""
        send, receive = self._row_counts(routed)
        rows = _exchange(_transposed(made, self._mine(routed).t()), self.peers, receive, send)
        return pad_rows(rows, weights.numel())

    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """Sum each token's rows: [n*k, h] -> [n, h]. Dropped assignments are zero, whatever their weight."""
        return combine_rows(returned, weights, order, place)

    def _row_counts(self, routed: Tensor) -> tuple[list[int], list[int]]:
        """Return the numbers of rows that go to each rank, and that come from each."""
        sent = routed[self.peers.index].view(self.peers.size, -1).sum(1)
        return sent.tolist(), self._mine(routed).sum(1).tolist()


class AllGather(Dispatcher):
    """Gathers all tokens on every rank. Each rank sums over its own experts, and a reduce-scatter completes the sums.

    Messages are large and few, and their sizes do not depend on the routing.
    """

    carries = ("row_origin", "row_weights")

    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Carry each row's origin, the index of its token over all ranks [m], and its weight [m]."""
        routed, orders = self._routed(counts), self.peers.gather(order[None])
        assignments = self._assignments(orders, routed)
        origin = assignments // weights.shape[1]
        rows = gather_sequence(tokens, self.peers).index_select(0, origin)
        row_weights = gather_sequence(weights, self.peers).flatten().index_select(0, assignments)
        return rows, routed, origin, row_weights

    def collect(self, made: Tensor, weights: Tensor, routed: Tensor, *carried: Tensor) -> Tensor:
        """Sum with weights over this rank's experts, round to ``made``'s type, sum over ranks: [m, h] -> [n, h]."""
        origin, row_weights = carried
        sums = add_rows(made, row_weights, origin, self.peers.size * len(weights))
        return scatter_sequence(sums, self.peers)

    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """No-op: the reduce-scatter has summed them."""
        return returned

    def _assignments(self, orders: Tensor, routed: Tensor) -> Tensor:
        """Return the assignments of this rank's experts, expert by expert, numbered over all ranks: [m].

        ``orders`` [p, n*k] are the ranks' orders, in which the assignments of an expert are contiguous.
        """
        ends, sizes = routed.cumsum(1).tolist(), routed.tolist()
        parts = [
            orders[rank, ends[rank][expert] - sizes[rank][expert] : ends[rank][expert]] + rank * orders.shape[1]
            for expert, rank in product(self.held, range(self.peers.size))
        ]
        return torch.cat(parts)


#: Dispatchers by their name in the configuration.
DISPATCHERS: Mapping[Dispatch, type[Dispatcher]] = {"alltoall": AllToAll, "allgather": AllGather}


def _transposed(rows: Tensor, sizes: Tensor) -> Tensor:
    """Reorder blocks of ``rows``, with ``sizes`` [a, b], from the order (a, b) to the order (b, a)."""
    outer, inner = sizes.shape
    if outer == 1 or inner == 1:
        return rows
    blocks = rows.split(sizes.flatten().tolist())
    return torch.cat([blocks[inner * i + j] for j, i in product(range(inner), range(outer))])


def _exchange(rows: Tensor, peers: ParallelGroup, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    if peers.size == 1:
        return rows
    received: Tensor = _Exchange.apply(rows, peers, send, receive)  # type: ignore[no-untyped-call]  # torch's
    return received


class _Exchange(torch.autograd.Function):
    """An all-to-all, whose gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: ParallelGroup, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        ctx.peers, ctx.send, ctx.receive = peers, send, receive
        return peers.exchange(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.exchange(grads[0], ctx.receive, ctx.send), None, None, None
