"""How data-parallel ranks share a flat buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.runtime.comm import Pending
    from megatron_run_engine.runtime.gradients import Bucket


class ShardingStrategy(ABC):
    """Says which values this rank updates, and moves gradients and parameters between the ranks accordingly.

    Everything happens per bucket, in an order that is equal on every rank.
    """

    @abstractmethod
    def updated(self, bucket: Bucket) -> range:
        """The values of ``bucket`` that this rank updates: its own share of them at least."""

    @abstractmethod
    def start_reduce(self, bucket: Bucket) -> Pending:
        """Start to sum ``bucket.grad`` over the ranks, in place, where this rank updates it."""

    @abstractmethod
    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        """Start to bring updated ``values``, parameters laid out as ``bucket`` is, to the ranks that lack them."""
