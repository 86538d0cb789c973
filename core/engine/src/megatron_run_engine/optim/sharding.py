"""Sharding of flat buffers over data-parallel ranks: the strategy, and one rank's shard of a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from megatron_run_engine.optim.ranges import param_ranges, part_boxes

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ParamInfo, Part
    from megatron_run_engine.runtime.comm import Pending
    from megatron_run_engine.runtime.gradients import Bucket


class ShardingStrategy(ABC):
    """Decides which values this rank updates, and moves gradients and parameters between ranks accordingly.

    The methods are called per bucket, in the same order on every rank.
    """

    @abstractmethod
    def updated(self, bucket: Bucket) -> range:
        """The values of ``bucket`` that this rank updates; they include its own share, ``bucket.shares[rank]``."""

    @abstractmethod
    def start_reduce(self, bucket: Bucket) -> Pending:
        """Start summing ``bucket.grad`` over the ranks, in place, at least where this rank updates it."""

    @abstractmethod
    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        """Start gathering updated ``values``, parameters in the layout of ``bucket``, on the ranks that lack them."""


Key = TypeVar("Key")


class Piece(NamedTuple):
    """Contiguous values of a bucket that form a box of one logical tensor.

    ``starts`` and ``sizes`` locate the box in the logical tensor ``part.name``, ``in_bucket`` its values in the bucket.
    """

    info: ParamInfo
    part: Part
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    in_bucket: range

    @property
    def is_first(self) -> bool:
        """Whether the piece contains the first value of its logical tensor."""
        return not any(self.starts)


class Shard:
    """The range ``updated`` of a bucket, which this rank updates, and within it the range ``owned``.

    Each value of the bucket is owned by one rank: only that rank saves it and counts it in norms. ``values`` are all
    parameters of the bucket, flat. ``masters`` and ``grads`` cover ``updated`` in the type ``main``: they are views of
    the parameters and gradients if those have that type, and separate buffers otherwise.
    """

    def __init__(self, bucket: Bucket, updated: range, owned: range, main: torch.dtype) -> None:
        self.bucket, self.updated, self.owned = bucket, updated, owned
        self.values = bucket.flatten_parameters()
        self._values, self._gradients = self._cut(self.values), self._cut(bucket.grad)
        self.masters = self._values.to(main)  # the same tensor, without a copy, if the types are equal
        self.grads = self._gradients.to(main)

    @property
    def has_masters(self) -> bool:
        """Whether the masters are a separate buffer."""
        return self.masters is not self._values

    @property
    def has_main_grads(self) -> bool:
        """Whether gradients are copied to a separate buffer before the update."""
        return self.grads is not self._gradients

    def take_gradients(self) -> None:
        """Copy the reduced gradients to ``grads``, unless they share storage."""
        if self.has_main_grads:
            self.grads.copy_(self._gradients)

    def give_values(self) -> None:
        """Round the masters to the parameters, unless they share storage."""
        if self.has_masters:
            self._values.copy_(self.masters)

    def local(self, in_bucket: range) -> slice:
        """The range ``in_bucket`` of the bucket as a slice of ``masters`` and ``grads``."""
        return slice(in_bucket.start - self.updated.start, in_bucket.stop - self.updated.start)

    def runs(self, key: Callable[[ParamInfo], Key], within: range) -> Iterator[tuple[Key, range]]:
        """The longest ranges ``within`` a range in which ``key`` is constant; padding belongs to the parameter before.

        Long ranges keep the number of the optimizer's tensors, and so of its kernels, small.
        """
        starts = (*self.bucket.starts.values(), len(self.bucket.grad))
        keys = [key(info) for info in self.bucket.infos.values()]
        first = 0
        for index, this in enumerate(keys):
            if keys[index + 1 : index + 2] == [this]:
                continue
            in_bucket = range(max(starts[first], within.start), min(starts[index + 1], within.stop))
            if in_bucket:
                yield this, in_bucket
            first = index + 1

    def counted(self) -> list[Tensor]:
        """The gradients that this rank adds to the global norm. They may include padding, which is zero."""
        return [
            self.grads[self.local(run)] for counted, run in self.runs(lambda info: info.counted, self.owned) if counted
        ]

    def pieces(self, within: range) -> Iterator[Piece]:
        """The boxes of logical tensors ``within`` a range of the bucket; padding is excluded."""
        lengths = {parameter: parameter.numel() for parameter in self.bucket.parameters}
        for parameter, found in param_ranges(self.bucket.starts, lengths, within):
            info, start = self.bucket.infos[parameter], self.bucket.starts[parameter]
            for part, starts, sizes, flat in part_boxes(parameter.shape, info.parts, found.param):
                yield Piece(info, part, starts, sizes, range(flat.start + start, flat.stop + start))

    def _cut(self, flat: Tensor) -> Tensor:
        return flat[self.updated.start : self.updated.stop]
