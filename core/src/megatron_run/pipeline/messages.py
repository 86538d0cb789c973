"""Messages between stages: post a receive, wait for it, send, and retire a send once it is proven consumed.

A message that stays on its stage is handed over in memory. Every other one crosses a directed channel in the order in
which its sender sends; receives are posted in that order, so nothing depends on tags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_run.contracts import Boundary
from megatron_run.errors import PluginError, RankLostError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from megatron_run.comm import Channels
    from megatron_run.pipeline.lower import Message


class Messenger:
    """Carries the messages of one stage. ``ranks`` maps a stage to the rank that this one talks to there."""

    def __init__(self, channels: Channels | None, ranks: Sequence[int], device: torch.device) -> None:
        self._channels, self._ranks, self._device = channels, ranks, device
        self._local: dict[Message, Tensor] = {}
        self._posted: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._sent: dict[Message, tuple[Tensor, dist.Work]] = {}

    @property
    def unretired(self) -> int:
        """Number of sent tensors that are still held for their receivers."""
        return len(self._sent)

    def post(self, message: Message, boundary: Boundary) -> None:
        """Start receiving ``message`` into a fresh tensor of its boundary's shape and dtype."""
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device=self._device)
        work = self._start(dist.irecv, message, tensor, message.source)
        self._posted[message] = (tensor, work)

    def wait(self, message: Message) -> Tensor:
        """The tensor of ``message``, once it is here."""
        if message.source == message.target:
            return self._local.pop(message)
        tensor, work = self._posted.pop(message)
        self._finish(message, work, message.source)
        return tensor

    def send(self, message: Message, tensor: Tensor, boundary: Boundary) -> None:
        """Start sending ``tensor``, which belongs to the messenger until it is retired.

        Raises :class:`PluginError` when shape or dtype differ from the boundary: a receiver would abort, or take the
        bytes for something else in silence.
        """
        found = Boundary(tuple(tensor.shape), tensor.dtype)
        if found != boundary:
            raise PluginError(
                f"{message} is {found.shape} {found.dtype}, the model declared {boundary.shape} {boundary.dtype}",
                fix="make Model.boundary and the chunk's output agree",
            )
        if message.source == message.target:
            self._local[message] = tensor
            return
        tensor = tensor.contiguous()
        work = self._start(dist.isend, message, tensor, message.target)
        self._sent[message] = (tensor, work)

    def retire(self, messages: Iterable[Message]) -> None:
        """Release sent tensors whose receivers are known to have used them."""
        for message in messages:
            _, work = self._sent.pop(message)
            self._finish(message, work, message.target)

    def flush(self) -> None:
        """Retire everything: the end of a step."""
        self.retire(list(self._sent))

    def _start(self, operation: _Operation, message: Message, tensor: Tensor, stage: int) -> dist.Work:
        if self._channels is None:
            raise ValueError(f"{message} crosses stages, but this run has one stage")
        group = self._channels.up if message.source < message.target else self._channels.down
        try:
            work = operation(tensor, self._ranks[stage], group=group)
        except RuntimeError as error:
            raise self._lost(message, stage) from error
        assert work is not None  # only a rank outside the group gets no handle
        return work

    def _finish(self, message: Message, work: dist.Work, stage: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(message, stage) from error

    def _lost(self, message: Message, stage: int) -> RankLostError:
        return RankLostError(
            f"rank {self._ranks[stage]} (stage {stage}) is lost", why=f"it did not answer while exchanging {message}"
        )


if TYPE_CHECKING:
    from collections.abc import Callable

    _Operation = Callable[..., dist.Work | None]
