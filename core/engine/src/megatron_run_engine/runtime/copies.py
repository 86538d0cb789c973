"""Copies between a device and host memory, each direction on a side stream; on a CPU a stand-in of equal order.

Who starts a copy gets an event. Work on the device waits for it by :meth:`Copies.wait`, and the host by
:meth:`Copies.finish`: nothing may read a target, or write to a source, before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


def nothing() -> None:
    """Nothing more to wait for."""


class Copies(Protocol):
    """Copies in one direction, on a side stream of the device."""

    def buffer(self, size: int) -> Tensor:
        """Memory to copy to: ``size`` bytes, uint8."""
        ...

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Callable[[], object] = nothing) -> Any:
        """Start to copy each (target, source) once the work issued so far is done. Return an event: all are copied.

        ``after`` makes the stream of the copies wait for more.
        """
        ...

    def wait(self, event: Any) -> None:
        """Let the work that is issued from now on wait for ``event``; the host does not."""
        ...

    def finish(self, event: Any) -> None:
        """Block the host until ``event``."""
        ...


class CudaCopies:
    """Copies between ``device`` and pinned memory; ``to_host`` is the direction.

    PyTorch caches pinned blocks, and gives one out again only when the copies that use it have run.
    """

    def __init__(self, device: torch.device, *, to_host: bool) -> None:
        self._device, self._to_host = device, to_host
        self._stream = torch.cuda.Stream(device)

    def buffer(self, size: int) -> Tensor:
        """Pinned, or on the device. The latter belongs to the current stream: it is freed in that stream's order."""
        if self._to_host:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Callable[[], object] = nothing) -> torch.cuda.Event:
        """See :class:`Copies`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            after()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied

    def wait(self, event: torch.cuda.Event) -> None:
        """See :class:`Copies`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self, event: torch.cuda.Event) -> None:
        """See :class:`Copies`."""
        event.synchronize()


class CpuCopies:
    """Copies within the host's memory, at once: equal values and counts, and nothing gained.

    Buffers are on ``device``: the CPU's, or those of a plan, which has no memory.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def buffer(self, size: int) -> Tensor:
        """See :class:`Copies`."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Callable[[], object] = nothing) -> None:
        """See :class:`Copies`."""
        after()
        for target, source in pairs:
            target.copy_(source)

    def wait(self, event: None) -> None:
        """Nothing is under way."""

    def finish(self, event: None) -> None:
        """Nothing is under way."""


def make_copies(device: torch.device, *, to_host: bool) -> Copies:
    """Copies between ``device`` and the host."""
    return CudaCopies(device, to_host=to_host) if device.type == "cuda" else CpuCopies(device)
