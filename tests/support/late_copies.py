"""Copies between host and device that run as late as they may, in the memory of a :class:`Device`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_run_engine.capture.graphs import weak_alias


class _Copy(NamedTuple):
    """A copy under way; ``written`` tells whether somebody still holds the target."""

    target: Tensor
    source: Tensor
    written: weakref.ref[torch.UntypedStorage]


class LateCopies:
    """Copies in their order, no earlier than when somebody waits for them or for a later one.

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

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> int:
        self.log.append(f"{self.name} starts")
        for target, source in pairs:
            sides = (target, weak_alias(source)) if self._to_host else (weak_alias(target), source)
            self._queue.append(_Copy(*sides, weakref.ref(target.untyped_storage())))
        return self._done + len(self._queue)

    def wait(self, event: int) -> None:
        self.log.append(f"{self.name} waits")
        while self._done < event:
            copy = self._queue.pop(0)
            self.lost += copy.written() is None
            copy.target.copy_(copy.source)
            self._done += 1
