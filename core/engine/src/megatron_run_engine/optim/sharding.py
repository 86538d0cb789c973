"""How data-parallel ranks divide a flat buffer: the strategy of an optimizer, and one rank's shard of a bucket."""

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
    """Decides which values this rank updates, and moves gradients and parameters between the ranks accordingly.

    All methods are called bucket by bucket, in an order that is equal on every rank.
    """

    @abstractmethod
    def updated(self, bucket: Bucket) -> range:
        """Return the values of ``bucket`` that this rank updates, which contain the share that it owns."""

    @abstractmethod
    def start_reduce(self, bucket: Bucket) -> Pending:
        """Start to sum ``bucket.grad`` over the ranks, in place, at least where this rank updates it."""

    @abstractmethod
    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        """Start to send updated ``values``, parameters in the layout of ``bucket``, to the ranks that lack them."""


Key = TypeVar("Key")


class Piece(NamedTuple):
    """Contiguous values of a buffer that form a box of one logical tensor.

    ``starts`` and ``sizes`` locate the box in the logical tensor ``part.name``. ``world`` is its range in the bucket.
    """

    info: ParamInfo
    part: Part
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    world: range

    @property
    def is_first(self) -> bool:
        """Whether it contains the first value of the logical tensor."""
        return not any(self.starts)


class Shard:
    """The values ``updated`` of a bucket by this rank, which alone owns the range ``owned`` within them.

    ``values`` are the bucket's parameters, flat. ``masters`` and ``grads`` cover ``updated`` in the type ``main``. They
    are views of the parameters' and gradients' storage if that has the type, and otherwise separate buffers.
    """

    def __init__(self, bucket: Bucket, updated: range, owned: range, main: torch.dtype) -> None:
        self.bucket, self.updated, self.owned = bucket, updated, owned
        self.values = bucket.flatten_parameters()
        self._values, self._gradients = self._cut(self.values), self._cut(bucket.grad)
        self.masters = self._values.to(main)  # to() returns its own tensor, a view, if the type is right already
        self.grads = self._gradients.to(main)

    @property
    def has_masters(self) -> bool:
        """Whether the masters are a separate buffer."""
        return self.masters is not self._values

    @property
    def has_main_grads(self) -> bool:
        """Whether gradients are converted to a separate buffer before the update."""
        return self.grads is not self._gradients

    def take_gradients(self) -> None:
        """Convert the reduced gradients to ``grads``."""
        if self.has_main_grads:
            self.grads.copy_(self._gradients)

    def give_values(self) -> None:
        """Round the masters to the parameters' type."""
        if self.has_masters:
            self._values.copy_(self.masters)

    def local(self, world: range) -> slice:
        """Return the slice of ``masters`` and ``grads`` for a range of the bucket."""
        return slice(world.start - self.updated.start, world.stop - self.updated.start)

    def runs(self, key: Callable[[ParamInfo], Key], within: range) -> Iterator[tuple[Key, range]]:
        """Yield the longest ranges ``within`` which ``key`` is equal. The padding after a parameter belongs to it."""
        starts = (*self.bucket.starts.values(), len(self.bucket.grad))
        keys = [key(info) for info in self.bucket.infos.values()]
        first = 0
        for index, this in enumerate(keys):
            if keys[index + 1 : index + 2] == [this]:
                continue
            world = range(max(starts[first], within.start), min(starts[index + 1], within.stop))
            if world:
                yield this, world
            first = index + 1

    def counted(self) -> list[Tensor]:
        """Return the gradients that this rank adds to the global norm. They may include padding, which is zero."""
        return [self.grads[self.local(run)] for counted, run in self.runs(_is_counted, self.owned) if counted]

    def pieces(self, within: range) -> Iterator[Piece]:
        """Yield the boxes of logical tensors ``within`` a range of the bucket, without padding."""
        lengths = {parameter: parameter.numel() for parameter in self.bucket.parameters}
        for parameter, found in param_ranges(self.bucket.starts, lengths, within):
            info, start = self.bucket.infos[parameter], self.bucket.starts[parameter]
            for part, starts, sizes, flat in part_boxes(parameter.shape, info.parts, found.param):
                yield Piece(info, part, starts, sizes, range(flat.start + start, flat.stop + start))

    def _cut(self, flat: Tensor) -> Tensor:
        return flat[self.updated.start : self.updated.stop]


def _is_counted(info: ParamInfo) -> bool:
    return info.counted
