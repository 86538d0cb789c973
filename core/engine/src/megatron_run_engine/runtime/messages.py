"""Messages between stages: posting receives, waiting, sending, and releasing sent tensors.

A message within a stage is handed over in memory. Every other message crosses a directed channel in the order in which
its sender sends. Receives are posted in the same order, so no tags are needed.

If only the sender knows a shape, a header with the unknown sizes precedes the message on the same channel. The receive
of the message cannot be posted before the header has arrived, and no later message may overtake it, so later receives
queue behind it in the sender's order. If every shape is known, there is no header and no queue.

Tensor-parallel ranks hold the same tensors and may share a message: each sends one equal part of it to its counterpart
on the other stage, where an all-gather joins the parts. This is the scatter/gather optimization of Narayanan et al.
2021 ("Efficient Large-Scale Language Model Training"), section 4.1: each rank's link between hosts carries fewer bytes,
and the all-gather uses the faster links within a host.
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

#: The error text of gloo for a peer that does not answer but is still connected.
_SILENT = re.compile(r"timed? ?out", re.IGNORECASE)


class _Transfer(NamedTuple):
    """A tensor in flight and its handle. ``shape`` is that of the whole message if the tensor is a part of it."""

    tensor: Tensor
    work: dist.Work
    shape: torch.Size | None = None


@dataclass
class _Awaited:
    """A message whose receive waits for those before it on its channel. ``header`` is set once it is posted."""

    message: Message
    boundary: Boundary
    header: _Transfer | None = None


class Messenger:
    """Carries the messages of one stage. ``ranks`` maps a stage to the rank that this one exchanges messages with.

    ``model`` is the name, in errors, of the plugin that declares the boundaries. ``sharers`` are the ranks of this
    stage that hold the same tensors and send a part each. If their number does not divide a message, each sends it
    whole. ``activity`` records what is sent and what is awaited.
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
        """Start to receive ``message`` into a new tensor of its boundary's shape and dtype.

        Behind a message of unknown shape it is queued. With ``one_order`` (from the instruction) it must take its place
        in the global order now, so this call blocks until the header has arrived.
        """
        # Blocking cannot deadlock, by induction over the messages in the global order, which is a linear extension of
        # all actions. Assume that all messages before this one arrive. Then its sender reaches the send and its
        # receiver reaches this post, since all that either needs was sent earlier in the order, and no unfinished
        # message stands before it on their streams. So this message arrives too. With a look-ahead, which posts before
        # its place in the order, blocking would deadlock: the gradient that 1F1B's first stage posts before F1 is the
        # answer to F1.
        queue = self._awaited[message.source]
        if boundary.known and not queue:
            self._receive(message, boundary)
            return
        queue.append(_Awaited(message, boundary))
        self._advance(queue)
        while one_order and queue:
            self._take_header(queue)

    def wait(self, message: Message) -> Tensor:
        """Wait for ``message`` and return its tensor."""
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
        """Start to send ``tensor``, which belongs to the messenger until :meth:`retire`.

        Raises :class:`PluginError` if shape or dtype differ from the boundary. The receiver would otherwise abort, or
        silently reinterpret the bytes.
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
        """Release sent tensors whose receivers have provably used them."""
        for message in messages:
            for transfer in self._sent.pop(message):
                self._finish("send", message, transfer, message.target)

    def flush(self) -> None:
        """Retire all sent messages at the end of a step."""
        self.retire(list(self._sent))

    def _advance(self, queue: deque[_Awaited]) -> None:
        """Post receives in the sender's order, up to and including the header of the first unknown shape."""
        while queue and queue[0].header is None:
            message, boundary = queue[0].message, queue[0].boundary
            if boundary.known:
                queue.popleft()
                self._receive(message, boundary)
            else:
                sizes = torch.empty(boundary.shape.count(None), dtype=torch.int64, device=self._device)
                queue[0].header = self._start(dist.irecv, message, sizes, message.source)

    def _take_header(self, queue: deque[_Awaited]) -> None:
        """Wait for the header at the head of ``queue``, post the receive of its message, and those queued behind it."""
        awaited = queue.popleft()
        assert awaited.header is not None  # _advance leaves only messages with a posted header at the head
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
        """Whether a message of ``shape`` is sent in parts. Both ends must decide alike, so only the shape counts."""
        return self._sharers.size > 1 and shape.numel() > 0 and shape.numel() % self._sharers.size == 0

    def _part_of(self, tensor: Tensor) -> Tensor:
        """Return what this rank sends of ``tensor`` [*]: all of it, or its part [numel / sharers]."""
        if not self._is_shared(tensor.shape):
            return tensor.contiguous()
        # Copy: a view would keep the storage of the whole tensor alive until it is retired.
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
        """Return the sizes in ``header``."""
        self._activity.enter("receive", Exchange(message, self._ranks[message.source]))
        try:
            header.work.wait()
            sizes: list[int] = header.tensor.tolist()  # on NCCL this copy blocks and fails, not wait() before it
        except RuntimeError as error:
            raise self._lost(message, message.source, error) from error
        return sizes

    def _lost(self, message: Message, stage: int, error: RuntimeError) -> RankLostError:
        assert self._channels is not None  # a message was exchanged
        silent = _SILENT.search(str(error)) is not None
        limit = f"it did not answer within {self._channels.timeout.total_seconds():g} s"
        return RankLostError(
            f"rank {self._ranks[stage]} (stage {stage}) is lost",
            why=f"{limit if silent else 'its connection broke'} while exchanging {message}",
            rank=self._ranks[stage],
        )
