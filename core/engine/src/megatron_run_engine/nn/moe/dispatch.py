"""Tokens to the ranks that hold their experts, and back: everything here that a host must know, it learns here.

Each of the p expert-parallel ranks holds e/p experts and has tokens of its own. A dispatcher gives this rank the rows
that its experts work on, sorted by expert, and later brings home what they made of them (Lepikhin et al. 2020,
"GShard", section 3.2).

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

    #: What :meth:`dispatch` hands to :meth:`collect` besides rows and ``routed``.
    carries: tuple[str, ...] = ()

    def __init__(self, peers: ParallelGroup, experts: int) -> None:
        self.peers = peers
        share = experts // peers.size
        self.held = range(peers.index * share, (peers.index + 1) * share)

    @abstractmethod
    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Tokens [n, h] and weights [n, k] -> rows [m, h], ``routed`` and what it carries."""

    @abstractmethod
    def collect(self, made: Tensor, weights: Tensor, routed: Tensor, *carried: Tensor) -> Tensor:
        """What the experts made of the rows, [m, h] -> what :meth:`combine` takes; its shape is that of ``weights``."""

    @abstractmethod
    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """The tokens' weighted sums over their experts, [n, h]."""

    def count(self, routed: Tensor) -> Tensor:
        """How many rows each expert of this rank has, int64 on the CPU."""
        return self._mine(routed).sum(0)

    def _mine(self, routed: Tensor) -> Tensor:
        """[p, e] -> [p, e/p]: what comes to this rank."""
        return routed[:, self.held.start : self.held.stop]

    def _routed(self, counts: Tensor) -> Tensor:
        """Every rank's ``counts`` [e] on the CPU: the one copy to the host, for which the device is waited for."""
        return self.peers.gather(counts[None]).cpu()


class AllToAll(Dispatcher):
    """Each token travels to the ranks of its experts and to no other, in two all-to-alls of unequal parts."""

    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Copies leave in the order of the experts, which is that of their ranks."""
        routed = self._routed(counts)
        send, receive = self._reducer(routed)
        rows = _exchange(copy_rows(tokens, order, place, sum(send)), self.peers, send, receive)
        return _transposed(rows, self._mine(routed)), routed

    def collect(self, made: Tensor, weights: Tensor, routed: Tensor, *carried: Tensor) -> Tensor:
        """The way back: [m, h] -> [n*k, h] in this rank's ``order``, zeros for what was dropped."""
        send, receive = self._reducer(routed)
        rows = _exchange(_transposed(made, self._mine(routed).t()), self.peers, receive, send)
        return pad_rows(rows, weights.numel())

    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """Each token's rows are at home: [n*k, h] -> [n, h]. What was dropped is zero, whatever its weight."""
        return combine_rows(returned, weights, order, place)

    def _reducer(self, routed: Tensor) -> tuple[list[int], list[int]]:
        """How many rows go to each rank and come from each."""
        sent = routed[self.peers.index].view(self.peers.size, -1).sum(1)
        return sent.tolist(), self._mine(routed).sum(1).tolist()


class AllGather(Dispatcher):
    """Every rank sees all tokens and sums over its own experts; one reduce-scatter makes the sums whole.

    Messages are large and few, and their sizes do not depend on the routing.
    """

    carries = ("row_origin", "row_weights")

    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Also each row's origin, its token among those of all ranks [m], and its weight [m]."""
        routed, orders = self._routed(counts), self.peers.gather(order[None])
        assignments = self._assignments(orders, routed)
        origin = assignments // weights.shape[1]
        rows = gather_sequence(tokens, self.peers).index_select(0, origin)
        row_weights = gather_sequence(weights, self.peers).flatten().index_select(0, assignments)
        return rows, routed, origin, row_weights

    def collect(self, made: Tensor, weights: Tensor, routed: Tensor, *carried: Tensor) -> Tensor:
        """Weighted sums over this rank's experts, rounded to the type of ``made``, then over all: [m, h] -> [n, h]."""
        origin, row_weights = carried
        sums = add_rows(made, row_weights, origin, self.peers.size * len(weights))
        return scatter_sequence(sums, self.peers)

    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """They are whole."""
        return returned

    def _assignments(self, orders: Tensor, routed: Tensor) -> Tensor:
        """Those of this rank's experts, one expert after the other, each rank's counted on from the one before: [m].

        ``orders`` [p, n*k]: in each rank's, what one expert takes lies together.
        """
        ends, sizes = routed.cumsum(1).tolist(), routed.tolist()
        parts = [
            orders[rank, ends[rank][expert] - sizes[rank][expert] : ends[rank][expert]] + rank * orders.shape[1]
            for expert, rank in product(self.held, range(self.peers.size))
        ]
        return torch.cat(parts)


#: By the name that a configuration gives them.
DISPATCHERS: Mapping[Dispatch, type[Dispatcher]] = {"alltoall": AllToAll, "allgather": AllGather}


def _transposed(rows: Tensor, sizes: Tensor) -> Tensor:
    """Blocks of ``rows``, ``sizes`` [a, b] in the order of a, then b -> the same blocks in the order of b, then a."""
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
