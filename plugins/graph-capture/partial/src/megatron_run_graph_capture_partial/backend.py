"""The contract of what records and replays on one kind of device, and tensors that keep no memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """Work recorded at fixed addresses."""

    def capture(self, pool: Any) -> AbstractContextManager[None]:
        """Within: record what is run; its results live in ``pool``. An error leaves the graph empty."""
        ...

    def replay(self) -> None:
        """Run it again on what lies at the same addresses now."""
        ...


class Backend(Protocol):
    """Makes graphs, and the pools of memory in which they leave their results."""

    def pool(self) -> Any:
        """Memory for graphs that are replayed in the order in which they were recorded."""
        ...

    def graph(self) -> Graph:
        """An empty graph."""
        ...

    def pool_bytes(self, pools: Iterable[Any]) -> int | None:
        """The most that ``pools`` held at once, each by itself, in bytes; None where it is not known."""
        ...


def weak_alias(tensor: Tensor) -> Tensor:
    """A tensor at the same place that does not keep its memory: the pool may give it to others.

    What a graph leaves behind is right where it lies until the order of replays says otherwise, so nothing has to keep
    it; and what nothing keeps, later graphs use again.
    """
    storage = tensor.untyped_storage()
    bare = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(bare, tensor.storage_offset(), tensor.size(), tensor.stride())
