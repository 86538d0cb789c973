"""A transport with NCCL's rules under the real messenger: a thread a stage, ordered streams, no tags, no buffers.

A stage's operations wait in streams, one for all of them or one for each direction between two stages. A send is done
when it stands at the head of its stream and the matching receive at the head of its own; nothing is copied before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from threading import Condition
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_run_engine.runtime.comm import Channels
from megatron_run_testing.schedule.ordered_channels import SwappedMessageError, TransportDeadlockError


@dataclass(eq=False)
class _Operation:
    """A send or a receive of ``stage``, and the work handle for it."""

    transport: OrderedTransport
    sends: bool
    tensor: Tensor
    stage: int
    peer: int
    done: bool = False

    def wait(self) -> None:
        self.transport.wait(self)

    def meets(self, receive: _Operation) -> bool:
        return self.sends and not receive.sends and (self.stage, self.peer) == (receive.peer, receive.stage)


@dataclass(frozen=True)
class _Port:
    """What a stage takes for a process group."""

    transport: OrderedTransport
    stage: int


class OrderedTransport:
    """Joins ``stages`` stages; ``one_stream`` is one for everything that a stage sends and receives."""

    def __init__(self, stages: int, *, one_stream: bool) -> None:
        self._stages, self._one_stream = stages, one_stream
        self._streams: dict[Hashable, deque[_Operation]] = defaultdict(deque)
        self._changed = Condition()
        self._running, self._blocked = stages, set[_Operation]()

    def run(self, stage_program: Callable[[int, Channels], Any]) -> list[Any]:
        """Call ``stage_program(stage, channels)`` in a thread for each stage; their results by stage."""
        kept = dist.isend, dist.irecv
        dist.isend, dist.irecv = _start(sends=True), _start(sends=False)
        try:
            with ThreadPoolExecutor(self._stages) as threads:
                return list(threads.map(lambda stage: self._run(stage_program, stage), range(self._stages)))
        finally:
            dist.isend, dist.irecv = kept

    def _run(self, stage_program: Callable[[int, Channels], Any], stage: int) -> Any:
        port: Any = _Port(self, stage)
        try:
            return stage_program(stage, Channels(port, port, timedelta(seconds=1)))
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def start(self, operation: _Operation) -> None:
        """Put ``operation`` at the end of its stream, and carry out what can be."""
        with self._changed:
            ends = (operation.stage, operation.peer) if operation.sends else (operation.peer, operation.stage)
            self._streams[operation.stage, "all" if self._one_stream else ends].append(operation)
            while self._carry_out():
                self._changed.notify_all()

    def wait(self, operation: _Operation) -> None:
        """Block until ``operation`` is done. Raises when no stage can go on."""
        with self._changed:
            self._blocked.add(operation)
            while not operation.done:
                if sum(not blocked.done for blocked in self._blocked) >= self._running:  # who has raised is still in it
                    self._changed.notify_all()
                    raise TransportDeadlockError
                self._changed.wait()
            self._blocked.remove(operation)

    def _carry_out(self) -> bool:
        """Let one send at the head of its stream meet the receive at the head of the other's."""
        heads = [stream for stream in self._streams.values() if stream]
        for sending in heads:
            for receiving in heads:
                send, receive = sending[0], receiving[0]
                if send.meets(receive):
                    _copy(sending.popleft(), receiving.popleft())
                    return True
        return False


def _copy(send: _Operation, receive: _Operation) -> None:
    if (send.tensor.shape, send.tensor.dtype) != (receive.tensor.shape, receive.tensor.dtype):
        raise SwappedMessageError(
            f"{tuple(send.tensor.shape)} arrived where {tuple(receive.tensor.shape)} was expected"
        )
    receive.tensor.copy_(send.tensor)
    send.done = receive.done = True


def _start(*, sends: bool) -> Callable[..., Any]:
    def start(tensor: Tensor, peer: int, group: _Port) -> _Operation:
        operation = _Operation(group.transport, sends, tensor, group.stage, peer)
        group.transport.start(operation)
        return operation

    return start
