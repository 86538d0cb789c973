"""Messages between stages: post a receive, wait for it, send, and retire a send once it is proven consumed.

A message that stays on its stage is handed over in memory. Every other one crosses a directed channel in the order in
which its sender sends; receives are posted in that order, so nothing depends on tags.

A message of which only the sender knows the shape is preceded, on the same channel, by a header: the unknown sizes.
Its own receive cannot be posted before the header is here, and nothing that follows on the channel may overtake it, so
posts queue up behind it in the sender's order. Where every shape is known there is no header and no queue.

Ranks of one stage that hold the same tensors, the tensor-parallel ones, may share a message: each sends one equal part
of it to its counterpart on the other stage, whose peers put the parts together again. That is the scatter/gather
optimization of Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training"), section 4.1: between hosts the
bytes of each rank's link shrink, and the gather runs over the faster links within a host.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from megatron_run.contracts.activity import Activity, Exchange
from megatron_run.errors import PluginError, RankLostError
from megatron_run_engine.runtime.comm import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from megatron_run.contracts import Boundary
    from megatron_run.contracts.activity import PhaseName
    from megatron_run.pipeline.lower import Message
    from megatron_run_engine.runtime.comm import Channels, ParallelGroup

    _Operation = Callable[..., dist.Work | None]

#: What gloo says when a peer is silent, and not gone.
_SILENT = re.compile(r"timed? ?out", re.IGNORECASE)


class _Transfer(NamedTuple):
    """A tensor on its way, and the handle to wait for. ``shape`` is that of the message of which it is a part."""

    tensor: Tensor
    work: dist.Work
    shape: torch.Size | None = None


@dataclass
class _Awaited:
    """A message that is to be received when those before it on its channel are; ``header`` once that is posted."""

    message: Message
    boundary: Boundary
    header: _Transfer | None = None


class Messenger:
    """Carries the messages of one stage. ``ranks`` maps a stage to the rank that this one talks to there.

    ``model`` is what errors call the one who declares the boundaries. ``sharers`` are the ranks of this stage that hold
    the same tensors and send a part each; a message that they do not divide is sent whole by each of them. ``phases``
    hears of what is sent and of what is waited for.
    """

    def __init__(
        self,
        channels: Channels | None,
        ranks: Sequence[int],
        device: torch.device,
        *,
        model: str = "the model",
        sharers: ParallelGroup = ALONE,
        activity: Activity | None = None,
    ) -> None:
        self._channels, self._ranks, self._device = channels, ranks, device
        self._activity = Activity() if activity is None else activity
        self._model, self._sharers = model, sharers
        self._local: dict[Message, Tensor] = {}
        self._awaited: defaultdict[int, deque[_Awaited]] = defaultdict(deque)
        self._posted: dict[Message, _Transfer] = {}
        self._sent: dict[Message, tuple[_Transfer, ...]] = {}

    @property
    def unretired(self) -> int:
        """Number of sent messages that are still held for their receivers."""
        return len(self._sent)

    def post(self, message: Message, boundary: Boundary, *, one_order: bool = False) -> None:
        """Start receiving ``message`` into a fresh tensor of its boundary's shape and dtype.

        Behind a shape that is still unknown it waits for its turn. With ``one_order``, as in the instruction, it
        cannot, since its place would be taken: this blocks until the header is here. That cannot deadlock, by induction
        over the messages in the global order, a linear extension of all actions. Let all before this one arrive: then
        its sender gets as far as its send and its receiver as far as this post, for whatever either needs before was
        sent earlier in the order, and nothing unfinished stands before it on their streams; so it arrives too. Where
        posts run ahead of their place (a lookahead) blocking would deadlock: the gradient that 1F1B's first stage posts
        before F1 answers F1.
        """
        queue = self._awaited[message.source]
        if boundary.known and not queue:
            self._receive(message, boundary)
            return
        queue.append(_Awaited(message, boundary))
        self._advance(queue)
        while one_order and queue:
            self._take_header(queue)

    def wait(self, message: Message) -> Tensor:
        """The tensor of ``message``, once it is here."""
        if message.local:
            return self._local.pop(message)
        while message not in self._posted:
            self._take_header(self._awaited[message.source])
        transfer = self._posted.pop(message)
        self._finish("receive", message, transfer, message.source)
        if transfer.shape is None:
            return transfer.tensor
        return self._sharers.gather(transfer.tensor).view(transfer.shape)

    def send(self, message: Message, tensor: Tensor, boundary: Boundary) -> None:
        """Start sending ``tensor``, which belongs to the messenger until it is retired.

        Raises :class:`PluginError` when shape or dtype differ from the boundary: a receiver would abort, or take the
        bytes for something else in silence.
        """
        if not boundary.fits(tensor):
            raise PluginError(
                f"{message} is {tuple(tensor.shape)} {tensor.dtype}, {self._model} declared {boundary}",
                fix="make Model.boundary and the chunk's output agree",
            )
        if message.local:
            self._local[message] = tensor
            return
        self._activity.enter("send", Exchange(message, self._ranks[message.target]))
        header = () if boundary.known else (self._send_sizes(message, boundary.unknown(tensor)),)
        transfer = self._start(dist.isend, message, self._part_of(tensor), message.target)
        self._sent[message] = (*header, transfer)

    def retire(self, messages: Iterable[Message]) -> None:
        """Release sent tensors whose receivers are known to have used them."""
        for message in messages:
            for transfer in self._sent.pop(message):
                self._finish("send", message, transfer, message.target)

    def flush(self) -> None:
        """Retire everything: the end of a step."""
        self.retire(list(self._sent))

    def _advance(self, queue: deque[_Awaited]) -> None:
        """Post what can be posted in the sender's order: receives, up to the header of the first unknown shape."""
        while queue and queue[0].header is None:
            message, boundary = queue[0].message, queue[0].boundary
            if boundary.known:
                queue.popleft()
                self._receive(message, boundary)
            else:
                sizes = torch.empty(boundary.shape.count(None), dtype=torch.int64, device=self._device)
                queue[0].header = self._start(dist.irecv, message, sizes, message.source)

    def _take_header(self, queue: deque[_Awaited]) -> None:
        """Wait for the header at the head of ``queue``; post the receive of its tensor, then what queued behind it."""
        awaited = queue.popleft()
        assert awaited.header is not None  # whoever waits has posted, and what has no header is not left at the head
        sizes = self._read(awaited.message, awaited.header)
        self._receive(awaited.message, awaited.boundary, sizes)
        self._advance(queue)

    def _send_sizes(self, message: Message, sizes: Sequence[int]) -> _Transfer:
        header = torch.tensor(sizes, dtype=torch.int64, device=self._device)
        return self._start(dist.isend, message, header, message.target)

    def _receive(self, message: Message, boundary: Boundary, sizes: Sequence[int] = ()) -> None:
        shape = torch.Size(boundary.resolve(sizes))
        shared = self._is_shared(shape)
        size = (shape.numel() // self._sharers.size,) if shared else shape
        tensor = torch.empty(size, dtype=boundary.dtype, device=self._device)
        transfer = self._start(dist.irecv, message, tensor, message.source)
        self._posted[message] = transfer._replace(shape=shape if shared else None)

    def _is_shared(self, shape: torch.Size) -> bool:
        """Whether a message of ``shape`` crosses in parts; both ends must find the same."""
        return self._sharers.size > 1 and shape.numel() > 0 and shape.numel() % self._sharers.size == 0

    def _part_of(self, tensor: Tensor) -> Tensor:
        """What this rank sends of ``tensor`` [*]: all of it, or its part [numel / sharers]."""
        if not self._is_shared(tensor.shape):
            return tensor.contiguous()
        # A copy: a view would keep all of the tensor until it is retired.
        return tensor.reshape(-1).chunk(self._sharers.size)[self._sharers.index].clone()

    def _start(self, operation: _Operation, message: Message, tensor: Tensor, stage: int) -> _Transfer:
        if self._channels is None:
            raise ValueError(f"{message} crosses stages, but this run has one stage")
        group = self._channels.up if message.source < message.target else self._channels.down
        try:
            work = operation(tensor, self._ranks[stage], group=group)
        except RuntimeError as error:
            raise self._lost(message, stage, error) from error
        assert work is not None  # only a rank outside the group gets no handle
        return _Transfer(tensor, work)

    def _finish(self, phase: PhaseName, message: Message, transfer: _Transfer, stage: int) -> None:
        self._activity.enter(phase, Exchange(message, self._ranks[stage]))
        try:
            transfer.work.wait()
        except RuntimeError as error:
            raise self._lost(message, stage, error) from error

    def _read(self, message: Message, header: _Transfer) -> list[int]:
        """The sizes in ``header``. On NCCL it is this copy to the host that waits, and fails, not the wait before."""
        self._activity.enter("receive", Exchange(message, self._ranks[message.source]))
        try:
            header.work.wait()
            sizes: list[int] = header.tensor.tolist()
        except RuntimeError as error:
            raise self._lost(message, message.source, error) from error
        return sizes

    def _lost(self, message: Message, stage: int, error: RuntimeError) -> RankLostError:
        assert self._channels is not None  # it was talked to
        silent = _SILENT.search(str(error)) is not None
        limit = f"it did not answer within {self._channels.timeout.total_seconds():g} s"
        return RankLostError(
            f"rank {self._ranks[stage]} (stage {stage}) is lost",
            why=f"{limit if silent else 'its connection broke'} while exchanging {message}",
            rank=self._ranks[stage],
        )
