"""How data-parallel ranks share a flat buffer."""

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


Key = TypeVar("Key")


class Piece(NamedTuple):
    """Values that lie together in a buffer and are a box of one logical tensor.

    ``starts`` and ``sizes`` are those of the logical tensor ``part.name``, ``world`` is the range in the bucket.
    """

    info: ParamInfo
    part: Part
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    world: range

    @property
    def is_first(self) -> bool:
        """Whether the logical tensor's very first value is here."""
        return not any(self.starts)


class Shard:
    """The values ``updated`` of a bucket; this rank alone answers for ``owned``, which lies within.

    ``values`` are the bucket's parameters, flat; ``masters`` and ``grads`` cover ``updated`` in the type ``main``. They
    are the parameters' and the gradients' own storage where those have that type, and buffers of their own otherwise.
    """

    def __init__(self, bucket: Bucket, updated: range, owned: range, main: torch.dtype) -> None:
        self.bucket, self.updated, self.owned = bucket, updated, owned
        self.values = bucket.flatten_parameters()
        self._values, self._gradients = self._cut(self.values), self._cut(bucket.grad)
        self.masters = self._values.to(main)  # no copy where the type is right already
        self.grads = self._gradients.to(main)

    @property
    def has_masters(self) -> bool:
        """Whether the masters are a buffer of their own."""
        return self.masters is not self._values

    @property
    def has_main_grads(self) -> bool:
        """Whether gradients are copied before the update."""
        return self.grads is not self._gradients

    def take_gradients(self) -> None:
        """Bring the reduced gradients into ``grads``."""
        if self.has_main_grads:
            self.grads.copy_(self._gradients)

    def give_values(self) -> None:
        """Round the masters to the parameters."""
        if self.has_masters:
            self._values.copy_(self.masters)

    def local(self, world: range) -> slice:
        """Where values of the bucket lie in ``masters`` and ``grads``."""
        return slice(world.start - self.updated.start, world.stop - self.updated.start)

    def runs(self, key: Callable[[ParamInfo], Key], within: range) -> Iterator[tuple[Key, range]]:
        """The longest ranges ``within`` which ``key`` is the same; the padding after a parameter goes with it."""
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
        """The gradients that this rank adds to the global norm. Padding may be among them: it is zero."""
        return [self.grads[self.local(run)] for counted, run in self.runs(_is_counted, self.owned) if counted]

    def pieces(self, within: range) -> Iterator[Piece]:
        """The boxes of logical tensors that lie ``within`` a range of the bucket; padding is left out."""
        lengths = {parameter: parameter.numel() for parameter in self.bucket.parameters}
        for parameter, found in param_ranges(self.bucket.starts, lengths, within):
            info, start = self.bucket.infos[parameter], self.bucket.starts[parameter]
            for part, starts, sizes, flat in part_boxes(parameter.shape, info.parts, found.param):
                yield Piece(info, part, starts, sizes, range(flat.start + start, flat.stop + start))

    def _cut(self, flat: Tensor) -> Tensor:
        return flat[self.updated.start : self.updated.stop]


def _is_counted(info: ParamInfo) -> bool:
    return info.counted
