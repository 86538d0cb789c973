"""Messages between stages: post a receive, wait for it, send, and retire a send once it is proven consumed.

A message is a microbatch's tensors at a boundary: one of most models, sent one after the other where there are more.

A message that stays on its stage is passed in memory. Every other message crosses a directed channel in the order in
which its sender sends. Receives are posted in that same order, so no tags are needed (NCCL has none).

If only the sender knows a shape of a message, a header with the unknown sizes precedes it on the same channel. The
receive of the message cannot be posted before the header has arrived, and no later message may overtake it, so posts
queue behind it in the sender's order. If every shape is known, there are no headers and no queue.

The tensor-parallel ranks of a stage hold the same tensors, so they may share a message: each sends one equal part to
its counterpart on the other stage, whose peers gather the parts. That is the scatter/gather optimization of Narayanan
et al. 2021 ("Efficient Large-Scale Language Model Training"), section 4.1: each rank sends fewer bytes between hosts,
and the gather runs over the faster links within a host.
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
from megatron_run_engine.runtime.comm import ALONE, passes_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from megatron_run.contracts import Boundary
    from megatron_run.contracts.activity import PhaseName
    from megatron_run.pipeline.lower import Message
    from megatron_run_engine.runtime.comm import Channels, ParallelGroup

    _Operation = Callable[..., dist.Work | None]
    #: x, or its gradient, then what is beside it.
    Tensors = tuple[Tensor, ...]

#: gloo's error text for a peer that does not answer; any other text means that the connection broke.
_TIMEOUT_TEXT = re.compile(r"timed? ?out", re.IGNORECASE)


class _Transfer(NamedTuple):
    """A tensor in transfer and its handle; if it is one part of a shared tensor, ``shape`` is that one's.

    Where gloo carries the messages of GPUs, the tensor lies on the host.
    """

    tensor: Tensor
    work: dist.Work
    shape: torch.Size | None = None


@dataclass
class _QueuedReceive:
    """A queued receive, to be posted after those before it on the channel; ``header`` once its receive is posted."""

    message: Message
    boundary: Boundary
    header: _Transfer | None = None


class Messenger:
    """Sends and receives the messages of one stage; ``ranks`` maps a stage to this rank's counterpart there.

    ``model`` is the name in errors of the plugin that declares the boundaries. ``sharers`` are the ranks of this stage
    that hold the same tensors and send one part each; a tensor whose size they do not divide is sent whole by each.
    ``activity`` is updated with each send and each wait.
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
        by_host = channels is not None and passes_host(device, channels.up)
        self._carried_on = torch.device("cpu") if by_host else device
        self._activity = activity or Activity()
        self._model, self._sharers = model, sharers
        self._local: dict[Message, Tensors] = {}
        self._queued: defaultdict[int, deque[_QueuedReceive]] = defaultdict(deque)
        self._posted: dict[Message, tuple[_Transfer, ...]] = {}
        self._sent: dict[Message, tuple[_Transfer, ...]] = {}  # not yet retired: their tensors are held

    def post(self, message: Message, boundary: Boundary, *, one_order: bool = False) -> None:
        """Start receiving ``message`` into new tensors of its boundary's shapes and dtypes.

        A receive behind an unknown shape is queued. With ``one_order`` (see the instruction) queueing would let another
        operation take its place in the communicator's order, so this blocks until the header has arrived.

        Blocking cannot deadlock, by induction over the messages in the global order, a linear extension of all actions.
        Suppose all messages before this one arrive. Then its sender reaches its send and its receiver reaches this
        post, because everything that either needs before was sent earlier in the order, and no unfinished operation
        precedes it on their streams. So this message arrives too. Where posts run ahead of the order (a lookahead),
        blocking would deadlock: 1F1B's first stage posts the receive of a gradient before F1, and that gradient depends
        on F1's output.
        """
        queue = self._queued[message.source]
        if boundary.known and not queue:
            self._receive(message, boundary)
            return
        queue.append(_QueuedReceive(message, boundary))
        self._advance(queue)
        while one_order and queue:
            self._take_header(queue)

    def wait(self, message: Message) -> Tensors:
        """Block until ``message`` has arrived, and return its tensors."""
        if message.local:
            return self._local.pop(message)
        while message not in self._posted:
            self._take_header(self._queued[message.source])
        return tuple([self._arrived(message, transfer) for transfer in self._posted.pop(message)])

    def send(self, message: Message, tensors: Tensors, boundary: Boundary) -> None:
        """Start sending ``tensors``, in the order of ``boundary``; they belong to the messenger until it is retired.

        Raises :class:`PluginError` if a shape or dtype differs from the boundary: the receiver would abort, or silently
        misread the bytes.
        """
        for name, each, tensor in zip(("", *boundary.beside), boundary.tensors, tensors, strict=True):
            if not each.fits(tensor):
                what = f"{name} beside {message}" if name else message
                raise PluginError(
                    f"{what} is {tuple(tensor.shape)} {tensor.dtype}, {self._model} declared {each}",
                    fix="make Model.boundary and the chunk's output agree",
                )
        if message.local:
            self._local[message] = tensors
            return
        self._activity.enter("send", Exchange(message, self._ranks[message.target]))
        header = () if boundary.known else (self._send_sizes(message, tensors, boundary),)
        # Held until it is retired: on gloo the buffer must stay unchanged until the receiver has it.
        self._sent[message] = (
            *header,
            *[
                self._start(dist.isend, message, self._part_of(tensor).to(self._carried_on), message.target)
                for tensor in tensors
            ],
        )

    def retire(self, messages: Iterable[Message]) -> None:
        """Release sent tensors whose receivers are known to have consumed them."""
        for message in messages:
            for transfer in self._sent.pop(message):
                self._finish("send", message, transfer, message.target)

    def flush(self) -> None:
        """Retire everything: the end of a step."""
        self.retire(list(self._sent))

    def _advance(self, queue: deque[_QueuedReceive]) -> None:
        """Post receives in the sender's order, up to and including the header of the first unknown shape."""
        while queue and queue[0].header is None:
            message, boundary = queue[0].message, queue[0].boundary
            if boundary.known:
                queue.popleft()
                self._receive(message, boundary)
            else:
                unknown = sum(each.shape.count(None) for each in boundary.tensors)
                sizes = torch.empty(unknown, dtype=torch.int64, device=self._carried_on)
                queue[0].header = self._start(dist.irecv, message, sizes, message.source)

    def _take_header(self, queue: deque[_QueuedReceive]) -> None:
        """Wait for the header at the head of ``queue``; post the receives of its message, then those behind it."""
        awaited = queue.popleft()
        assert awaited.header is not None  # _advance leaves no entry without a header at the head
        sizes = self._read(awaited.message, awaited.header)
        self._receive(awaited.message, awaited.boundary, sizes)
        self._advance(queue)

    def _send_sizes(self, message: Message, tensors: Tensors, boundary: Boundary) -> _Transfer:
        sizes = [size for each, x in zip(boundary.tensors, tensors, strict=True) for size in each.unknown(x)]
        header = torch.tensor(sizes, dtype=torch.int64, device=self._carried_on)
        return self._start(dist.isend, message, header, message.target)

    def _receive(self, message: Message, boundary: Boundary, sizes: Sequence[int] = ()) -> None:
        remaining = iter(sizes)  # each tensor takes its own
        self._posted[message] = tuple(
            [self._receive_one(message, torch.Size(each.resolve(remaining)), each.dtype) for each in boundary.tensors]
        )

    def _receive_one(self, message: Message, shape: torch.Size, dtype: torch.dtype) -> _Transfer:
        shared = self._is_shared(shape)
        size = (shape.numel() // self._sharers.size,) if shared else shape
        tensor = torch.empty(size, dtype=dtype, device=self._carried_on)
        transfer = self._start(dist.irecv, message, tensor, message.source)
        return transfer._replace(shape=shape if shared else None)

    def _arrived(self, message: Message, transfer: _Transfer) -> Tensor:
        self._finish("receive", message, transfer, message.source)
        tensor = transfer.tensor.to(self._device)
        if transfer.shape is None:
            return tensor
        # Safe as a collective: all sharers run the same instructions, so they gather in the same order.
        return self._sharers.gather(tensor).view(transfer.shape)

    def _is_shared(self, shape: torch.Size) -> bool:
        """Whether a message of ``shape`` is sent in parts; it follows from the shape, so that both ends agree."""
        return self._sharers.size > 1 and shape.numel() > 0 and shape.numel() % self._sharers.size == 0

    def _part_of(self, tensor: Tensor) -> Tensor:
        """The values of ``tensor`` [*] that this rank sends: all of it, or its part [numel / sharers]."""
        if not self._is_shared(tensor.shape):
            return tensor.contiguous()
        # A copy: a view would keep the storage of the whole tensor until the message is retired.
        return tensor.reshape(-1).chunk(self._sharers.size)[self._sharers.index].clone()

    def _start(self, operation: _Operation, message: Message, tensor: Tensor, stage: int) -> _Transfer:
        if self._channels is None:
            raise ValueError(f"{message} crosses stages, but this run has one stage")
        # A group for each direction: within one, NCCL runs the operations of a pair of ranks one after the other.
        group = self._channels.up if message.source < message.target else self._channels.down
        try:
            work = operation(tensor, self._ranks[stage], group=group)
        except RuntimeError as error:
            raise self._lost(message, stage, error) from error
        assert work is not None  # torch returns None only on a rank outside the group
        return _Transfer(tensor, work)

    def _finish(self, phase: PhaseName, message: Message, transfer: _Transfer, stage: int) -> None:
        self._activity.enter(phase, Exchange(message, self._ranks[stage]))
        try:
            transfer.work.wait()
        except RuntimeError as error:
            raise self._lost(message, stage, error) from error

    def _read(self, message: Message, header: _Transfer) -> list[int]:
        """The sizes in ``header``.

        On NCCL ``wait`` only orders streams, so it is the copy to the host that blocks, and that raises when a rank is
        lost.
        """
        self._activity.enter("receive", Exchange(message, self._ranks[message.source]))
        try:
            header.work.wait()
            sizes: list[int] = header.tensor.tolist()
        except RuntimeError as error:
            raise self._lost(message, message.source, error) from error
        return sizes

    def _lost(self, message: Message, stage: int, error: RuntimeError) -> RankLostError:
        assert self._channels is not None  # the failed operation used them
        silent = _TIMEOUT_TEXT.search(str(error)) is not None
        limit = f"it did not answer within {self._channels.timeout.total_seconds():g} s"
        return RankLostError(
            f"rank {self._ranks[stage]} (stage {stage}) is lost",
            why=f"{limit if silent else 'its connection broke'} while exchanging {message}",
            rank=self._ranks[stage],
        )
