"""How keys and values come to the ranks that need them, and how their gradients go home.

Legend: C context-parallel ranks; ``part`` are the keys and values of one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from megatron_run_engine.runtime import ParallelGroup, Pending


class Leaving(Protocol):
    """The gradients of a backward on their way to the ranks whose keys they are of."""

    def add(self, owner: int, grad: Tensor) -> None:
        """Take ``grad``, fp32, of the part of ``owner``, which has just arrived."""
        ...

    def own(self) -> Tensor:
        """The sum over all ranks of the gradients of this rank's part. Collective."""
        ...


class Transport(Protocol):
    """The way of parts and gradients; one for all layers, without a state."""

    def arriving(self, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's part, this one's first, with its rank. What comes next travels meanwhile. Collective."""
        ...

    def leaving(self) -> Leaving:
        """The gradients of one backward."""
        ...


class Ring:
    """Parts go from rank to rank: at step t rank i has that of rank i - t. Gradients follow them, a step behind."""

    def __init__(self, peers: ParallelGroup) -> None:
        self._peers = peers

    def arriving(self, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        """A part is sent on while it is computed with."""
        peers = self._peers
        for step in range(peers.size):
            following = peers.start_pass_on(part) if step + 1 < peers.size else None
            yield (peers.index - step) % peers.size, part
            part = part if following is None else following.wait()

    def leaving(self) -> Leaving:
        """They arrive where the part has just been, and are home after C - 1 hops."""
        return _RingLeaving(self._peers)


class _RingLeaving:
    def __init__(self, peers: ParallelGroup) -> None:
        self._peers = peers
        self._home: Tensor | None = None
        self._travelling: Pending | None = None

    def add(self, owner: int, grad: Tensor) -> None:
        """Keep the gradient of this rank's part; add to another's what the ranks before have found, and send it on."""
        if owner == self._peers.index:
            self._home = grad
            return
        if self._travelling is not None:
            grad = grad + self._travelling.wait()
        self._travelling = self._peers.start_pass_on(grad)

    def own(self) -> Tensor:
        """The last hop leads home."""
        assert self._home is not None, "every backward has a part of its own"
        return self._home if self._travelling is None else self._home + self._travelling.wait()


class AllGather:
    """All parts come at once, while this rank computes with its own; gradients go home by a reduce-scatter."""

    def __init__(self, peers: ParallelGroup) -> None:
        self._peers = peers

    def arriving(self, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        """In the order of the ring."""
        peers = self._peers
        pending = peers.start_gather(part[None])
        yield peers.index, part
        whole = pending.wait()  # [C, *part]
        for step in range(1, peers.size):
            owner = (peers.index - step) % peers.size
            yield owner, whole[owner]

    def leaving(self) -> Leaving:
        """All of them leave at the end."""
        return _GatheredLeaving(self._peers)


class _GatheredLeaving:
    def __init__(self, peers: ParallelGroup) -> None:
        self._peers = peers
        self._parts: dict[int, Tensor] = {}

    def add(self, owner: int, grad: Tensor) -> None:
        """Keep it."""
        self._parts[owner] = grad

    def own(self) -> Tensor:
        """The sum of this rank's share."""
        return self._peers.scatter_sum(torch.stack([self._parts[rank] for rank in range(self._peers.size)]))[0]


def make_transport(method: str, peers: ParallelGroup) -> Transport:
    """That of ``method``, ``ring`` or ``all_gather``."""
    return Ring(peers) if method == "ring" else AllGather(peers)
