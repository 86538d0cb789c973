"""Dispatchers: tokens travel to the ranks that hold their experts, and the results travel back.

Each of the p expert-parallel ranks holds e/p experts and its own tokens. A dispatcher gives this rank the rows for its
experts, sorted by expert, and later returns the results to the tokens' ranks (Lepikhin et al. 2020, "GShard", section
3.2). Only here does the host read how tokens were routed: it needs the sizes of the messages, and of what a capacity
leaves over. It reads once a layer, and works on while the numbers are on their way. On one rank without a capacity, and
with experts padded to theirs, it need not.

Legend: n tokens, h hidden, e experts, k experts of a token, p expert-parallel ranks, m rows of this rank's experts, s
slots of all experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_run_engine.nn.device import on_gpu, stands_for_gpu
from megatron_run_engine.nn.moe.placement import (
    combine_rows,
    copy_rows,
    copy_to_slots,
    kept_rows,
    pad_rows,
    sum_rows,
)
from megatron_run_engine.nn.parallel.mappings import gather_sequence, scatter_sequence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_run_engine.nn.spec import Dispatch, ExpertSpec
    from megatron_run_engine.runtime.comm import ParallelGroup


class Dispatcher(ABC):
    """Moves tokens between ``peers``, each of which holds an equal share of ``experts``.

    ``order``, ``place`` and ``counts`` are those of a :class:`~megatron_run_engine.nn.moe.placement.Placement`.
    ``routed`` [p, e], int64 on the CPU, is the number of tokens that each rank sends to each expert. ``why_dynamic`` is
    why shapes follow the routing, which the host then reads; empty where they do not.
    """

    #: Names of further tensors that :meth:`dispatch` returns and :meth:`collect` takes, after the rows.
    carries: tuple[str, ...] = ("routed",)

    def __init__(self, peers: ParallelGroup, experts: int, why_dynamic: str = "") -> None:
        self.peers, self.held, self.why_dynamic = peers, held_experts(peers, experts), why_dynamic

    @abstractmethod
    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Tokens [n, h] and weights [n, k] -> rows [m, h], and the tensors named in :attr:`carries`."""

    @abstractmethod
    def collect(self, results: Tensor, weights: Tensor, *carried: Tensor) -> Tensor:
        """Return the experts' results [m, h] to the tokens' ranks, as :meth:`combine` takes them.

        The shape of the result follows from ``weights`` alone, not from the routing.
        """

    @abstractmethod
    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """Each token's weighted sum over its experts, [n, h]."""

    def count(self, rows: Tensor, *carried: Tensor) -> Tensor | int:
        """Number of ``rows`` of each of this rank's experts: [e/p], integers, or an int that is each one's."""
        return self._to_this_rank(carried[0]).sum(0)

    def _to_this_rank(self, routed: Tensor) -> Tensor:
        """[p, e] -> [p, e/p]: the tokens that come to this rank."""
        return routed[:, self.held.start : self.held.stop]

    def _routed(self, counts: Tensor) -> HostCopy:
        """Every rank's ``counts`` [e] -> [p, e], to arrive on the CPU: all that the host reads of a layer."""
        return HostCopy(self.peers.gather(counts[None]))


class OneRank(Dispatcher):
    """One rank holds every expert: nothing travels, each token becomes k rows, and the counts stay on the device."""

    carries = ("share",)

    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Copy each token once per assignment, sorted by expert: [n*k, h]. The counts leave as int32."""
        return copy_rows(tokens, order, place), counts.to(torch.int32)

    def collect(self, results: Tensor, weights: Tensor, *carried: Tensor) -> Tensor:
        """The results as they are, [n*k, h] in ``order``."""
        return results

    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """Sum each token's k rows: [n*k, h] -> [n, h]."""
        return combine_rows(returned, weights, order, place)

    def count(self, rows: Tensor, *carried: Tensor) -> Tensor:
        """The rows of each expert, on their device."""
        return carried[0]


class AllToAll(Dispatcher):
    """Each token travels only to the ranks of its experts, in two all-to-alls of unequal parts."""

    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Send one copy per assignment, sorted by expert: that is also the order of the experts' ranks.

        Also copied are those that are dropped, which come last: how many there are arrives meanwhile.
        """
        arriving = self._routed(counts)
        copies = copy_rows(tokens, order, place)
        routed = arriving.wait()
        send, receive = self._split_sizes(routed)
        rows = _exchange(kept_rows(copies, sum(send)), self.peers, send, receive)
        return _transpose_blocks(rows, self._to_this_rank(routed)), routed

    def collect(self, results: Tensor, weights: Tensor, *carried: Tensor) -> Tensor:
        """Send rows back: [m, h] -> [n*k, h] in this rank's ``order``, zeros for dropped assignments."""
        (routed,) = carried
        send, receive = self._split_sizes(routed)
        rows = _exchange(_transpose_blocks(results, self._to_this_rank(routed).t()), self.peers, receive, send)
        return pad_rows(rows, weights.numel())

    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """Sum each token's k rows: [n*k, h] -> [n, h]. Dropped rows are zero and add nothing, whatever their weight."""
        return combine_rows(returned, weights, order, place)

    def _split_sizes(self, routed: Tensor) -> tuple[list[int], list[int]]:
        """Number of rows that this rank sends to, and receives from, each rank."""
        sent = routed[self.peers.index].view(self.peers.size, -1).sum(1)
        return sent.tolist(), self._to_this_rank(routed).sum(1).tolist()


class Padded(Dispatcher):
    """Each expert gets its slots from every rank, filled or not, in two all-to-alls of equal parts.

    Of a padded placement; shapes follow from the number of its slots alone.
    """

    carries = ()

    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Send every expert's slots to its rank: [s, h], sorted there by expert, then by rank."""
        rows = self._exchange(copy_to_slots(tokens, order, place))
        return (_transpose_equal_blocks(rows, self.peers.size, len(self.held)),)

    def collect(self, results: Tensor, weights: Tensor, *carried: Tensor) -> Tensor:
        """Send the slots back: [s, h] in this rank's ``order``."""
        return self._exchange(_transpose_equal_blocks(results, len(self.held), self.peers.size))

    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """Sum the rows in each token's slots: [s, h] -> [n, h]."""
        return combine_rows(returned, weights, order, place, slots=True)

    def count(self, rows: Tensor, *carried: Tensor) -> int:
        """The slots of an expert, those of all ranks."""
        return len(rows) // len(self.held)

    def _exchange(self, rows: Tensor) -> Tensor:
        parts = [len(rows) // self.peers.size] * self.peers.size
        return _exchange(rows, self.peers, parts, parts)


class AllGather(Dispatcher):
    """Every rank gathers all tokens and sums over its own experts; a reduce-scatter completes the sums.

    Messages are few and large, and their sizes do not depend on the routing.
    """

    carries = ("routed", "row_origin", "row_weights")

    def dispatch(
        self, tokens: Tensor, weights: Tensor, order: Tensor, place: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Also return each row's origin, the index of its token among all ranks' tokens [m], and its weight [m]."""
        arriving, orders = self._routed(counts), self.peers.gather(order[None])
        all_tokens, all_weights = gather_sequence(tokens, self.peers), gather_sequence(weights, self.peers)
        routed = arriving.wait()
        assignments = self._assignments(orders, routed)
        origin = assignments // weights.shape[1]
        rows = all_tokens.index_select(0, origin)
        return rows, routed, origin, all_weights.flatten().index_select(0, assignments)

    def collect(self, results: Tensor, weights: Tensor, *carried: Tensor) -> Tensor:
        """Weighted sums over this rank's experts, rounded to the type of ``results``, then over ranks: -> [n, h]."""
        _, origin, row_weights = carried
        sums = sum_rows(results, row_weights, origin, self.peers.size * len(weights))
        return scatter_sequence(sums, self.peers)

    def combine(self, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """Return the sums as they are: the reduce-scatter in :meth:`collect` has completed them."""
        return returned

    def _assignments(self, orders: Tensor, routed: Tensor) -> Tensor:
        """Assignments to this rank's experts, sorted by expert, then by rank: [m], numbered over all ranks.

        ``orders`` [p, n*k] are the ranks' assignments sorted by expert, so each expert's form one range of a row.
        """
        ends, sizes = routed.cumsum(1).tolist(), routed.tolist()
        parts = [
            orders[rank, ends[rank][expert] - sizes[rank][expert] : ends[rank][expert]] + rank * orders.shape[1]
            for expert, rank in product(self.held, range(self.peers.size))
        ]
        return torch.cat(parts)


#: Dispatchers of what is not padded, by the name that the configuration uses.
DISPATCHERS: Mapping[Dispatch, type[Dispatcher]] = {"alltoall": AllToAll, "allgather": AllGather}


def make_dispatcher(spec: ExpertSpec, peers: ParallelGroup, *, on_device: bool) -> Dispatcher:
    """The dispatcher that ``spec`` asks for. ``on_device``: the experts take counts that stay on the device."""
    if spec.pad:
        return Padded(peers, spec.count)
    if peers.size > 1:
        why = f"tokens travel among {peers.size} expert-parallel ranks"
    elif spec.capacity_factor is not None:
        why = "model.experts.capacity_factor drops some of them"
    elif not on_device:
        why = "the experts' layers need it there (on CUDA all but those in bf16 on compute capability 9.x and 10.x)"
    else:
        return OneRank(peers, spec.count)
    return DISPATCHERS[spec.dispatch](peers, spec.count, why)


def held_experts(peers: ParallelGroup, experts: int) -> range:
    """Those that this rank holds out of all ``experts``."""
    share = experts // peers.size
    return range(peers.index * share, (peers.index + 1) * share)


class HostCopy:
    """A copy of ``numbers`` to the host that has begun, so that the host works on until it needs them."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if stands_for_gpu(numbers) or not on_gpu(numbers):
            self._numbers = numbers
            return
        # Pinned, since a copy to other memory lets the host wait.
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> Tensor:
        """The numbers, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers


def _transpose_blocks(rows: Tensor, sizes: Tensor) -> Tensor:
    """Reorder blocks of ``rows``: block (i, j) has ``sizes[i, j]`` rows; sorted by i, then j -> by j, then i.

    An all-to-all delivers rows by rank, then expert; the experts' product needs them by expert, then rank.
    """
    outer, inner = sizes.shape
    if outer == 1 or inner == 1:
        return rows
    blocks = rows.split(sizes.flatten().tolist())
    return torch.cat([blocks[inner * i + j] for j, i in product(range(inner), range(outer))])


def _transpose_equal_blocks(rows: Tensor, outer: int, inner: int) -> Tensor:
    """:func:`_transpose_blocks` of blocks of one size."""
    if outer == 1 or inner == 1:
        return rows
    return rows.view(outer, inner, -1, rows.shape[-1]).transpose(0, 1).reshape(rows.shape)


def _exchange(rows: Tensor, peers: ParallelGroup, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    if peers.size == 1:
        return rows
    received: Tensor = _Exchange.apply(rows, peers, send, receive)  # type: ignore[no-untyped-call]  # torch's
    return received


class _Exchange(torch.autograd.Function):
    """An all-to-all; its backward is the all-to-all with send and receive sizes exchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: ParallelGroup, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        ctx.peers, ctx.send, ctx.receive = peers, send, receive
        return peers.exchange(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.exchange(grads[0], ctx.receive, ctx.send), None, None, None
