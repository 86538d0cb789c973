"""The interface of a device's recorder: graphs, and the memory pools that hold their results."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor


class Graph(Protocol):
    """Work recorded at fixed addresses."""

    def capture(self, pool: Any) -> AbstractContextManager[None]:
        """Record the operations inside the context; their results live in ``pool``. An error leaves the graph empty."""
        ...

    def replay(self) -> None:
        """Run the recorded operations on the current contents of the same addresses."""
        ...


class Backend(Protocol):
    """Makes graphs, and the memory pools that hold their results."""

    def pool(self) -> Any:
        """Memory for graphs that replay in the order of their recording."""
        ...

    def graph(self) -> Graph:
        """An empty graph."""
        ...

    def pool_bytes(self, pools: Iterable[Any]) -> int | None:
        """The sum of each pool's peak in bytes; None if unknown."""
        ...


class Place(NamedTuple):
    """A fixed address of a graph, at which ``tensor`` lies.

    ``owner`` holds the memory: the tensor itself, or a graph, which holds its pool. So no replay reads or writes memory
    that the allocator may give to others.
    """

    tensor: Tensor
    owner: Tensor | Graph

    @classmethod
    def static(cls, tensor: Tensor) -> Self:
        """A place outside of all pools, which exists as long as its tensor."""
        return cls(tensor, tensor)

    @classmethod
    def of_result(cls, tensor: Tensor, graph: Graph, given: Iterable[Place]) -> Self:
        """The place of a result of ``graph``, in its pool; a result that lies in a ``given`` place has its owner.

        The graph may reuse the memory of a result for later ones, which it could not if the place held the tensor.
        """
        storage = tensor.untyped_storage().data_ptr()
        owners = (place.owner for place in given if place.tensor.untyped_storage().data_ptr() == storage)
        return cls(weak_alias(tensor), next(owners, graph))


def weak_alias(tensor: Tensor) -> Tensor:
    """A tensor at the same address that does not keep the memory alive, so the pool may reuse it.

    A graph's results stay valid at their addresses until the order of replays overwrites them, so no reference is
    needed; and only unreferenced memory can be shared with later graphs. Whoever keeps one holds the memory in another
    way: see :class:`Place`.
    """
    storage = tensor.untyped_storage()
    bare = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(bare, tensor.storage_offset(), tensor.size(), tensor.stride())
