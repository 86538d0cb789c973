"""Copies between host and device that run as late as they may, in the memory of a :class:`Device`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_run_engine.capture.graphs import weak_alias
from tests.support.device_memory import POISON


class _Copy(NamedTuple):
    """A copy under way that is made ``after``; ``written`` tells whether somebody still holds the target."""

    target: Tensor
    source: Tensor
    written: weakref.ref[torch.UntypedStorage]
    after: Callable[[], object]


class LateCopies:
    """Copies in their order, no earlier than when somebody waits for them or for a later one; until then NaN is there.

    A copy keeps its host memory, as the allocator of pinned memory does, and not its memory on the device: given up too
    early, what it reads there is NaN or a stranger's, and what it writes spoils a stranger. ``lost`` counts the latter.
    """

    def __init__(self, name: str, log: list[str], *, to_host: bool) -> None:
        self.name, self.log, self.lost = name, log, 0
        self._to_host = to_host
        self._queue: list[_Copy] = []
        self._done = 0

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Callable[[], object] = lambda: None) -> int:
        self.log.append(f"{self.name} starts")
        for target, source in pairs:
            target.view(-1).view(torch.uint8).fill_(POISON)
            sides = (target, weak_alias(source)) if self._to_host else (weak_alias(target), source)
            self._queue.append(_Copy(*sides, weakref.ref(target.untyped_storage()), after))
        return self._done + len(self._queue)

    def wait(self, event: int) -> None:
        self.log.append(f"{self.name} waits")
        self._run(event)

    def finish(self, event: int) -> None:
        self.log.append(f"{self.name} ends")
        self._run(event)

    def _run(self, event: int) -> None:
        while self._done < event:
            copy = self._queue.pop(0)
            self.lost += copy.written() is None
            copy.after()
            copy.target.copy_(copy.source)
            self._done += 1
