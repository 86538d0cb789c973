"""Sharding of flat buffers over data-parallel ranks: ranges of values, the strategy, and one rank's shard of a bucket.

A parameter's values have a range in a flat buffer, one in a rank's share of it, and one in the parameter. These are the
three ranges of a distributed optimizer on contiguous buffers (Rajbhandari et al. 2020, ZeRO-1). A share may end in the
middle of a parameter, so a parameter may straddle ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from megatron_run_engine.runtime.comm import Pending

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ParamInfo, Part
    from megatron_run_engine.optim.buckets import Bucket
    from megatron_run_engine.runtime.comm import ParallelGroup

Key = TypeVar("Key")
#: See :class:`Shard`.
Keep = Callable[["Tensor"], "Tensor"]


class ParamRange(NamedTuple):
    """One parameter's values in one share, as three ranges of equal length.

    ``in_bucket`` counts from the start of the buffer, ``local`` from the start of the share, ``param`` from the start
    of the parameter.
    """

    in_bucket: range
    local: range
    param: range


def param_range(start: int, length: int, share: range) -> ParamRange | None:
    """The values in ``share`` of a parameter at ``start`` of the buffer; None if it has none there."""
    in_bucket = range(max(start, share.start), min(start + length, share.stop))
    return ParamRange(in_bucket, _from(share.start, in_bucket), _from(start, in_bucket)) if in_bucket else None


def param_ranges(
    starts: Mapping[Key, int], lengths: Mapping[Key, int], share: range
) -> Iterator[tuple[Key, ParamRange]]:
    """Every parameter that has values in ``share``, in the order of the buffer."""
    for key, start in starts.items():
        found = param_range(start, lengths[key], share)
        if found is not None:
            yield key, found


def _from(origin: int, in_bucket: range) -> range:
    return range(in_bucket.start - origin, in_bucket.stop - origin)


class FlatBox(NamedTuple):
    """A box of a tensor: ``starts`` and ``sizes`` per dimension, and the range ``flat`` in the flattened tensor."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: range


class PartBox(NamedTuple):
    """A box of the logical tensor ``part.name``, whose values are the range ``flat`` of the flattened parameter."""

    part: Part
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: range


def part_boxes(shape: tuple[int, ...], parts: Sequence[Part], flat: range) -> Iterator[PartBox]:
    """The boxes of logical tensors in the values ``flat`` of a parameter of ``shape`` that holds ``parts``.

    Padding is excluded.
    """
    columns = shape[1:]
    row = prod(columns)
    for part in parts:
        first, end = part.local.start * row, part.local.stop * row
        inside = range(max(flat.start, first) - first, min(flat.stop, end) - first)
        origin = (part.start, part.column, *(0 for _ in columns[1:]))
        for box in boxes((len(part.local), *columns), inside):
            starts = tuple(start + offset for start, offset in zip(box.starts, origin, strict=False))
            yield PartBox(part, starts, box.sizes, range(box.flat.start + first, box.flat.stop + first))


def boxes(shape: tuple[int, ...], flat: range) -> Iterator[FlatBox]:
    """Cut the values ``flat`` of a contiguous tensor of ``shape`` into boxes, in order: at most ``2 * ndim - 1``.

    Each box is whole in every dimension after the first one in which it is cut, so its values are contiguous. A range
    of a matrix, for example, becomes the end of a row, whole rows, and the beginning of a row.
    """
    if not flat:
        return
    if len(shape) < 2:
        yield FlatBox((flat.start,) * len(shape), (len(flat),) * len(shape), flat)
        return
    row, inner = prod(shape[1:]), shape[1:]
    first, last = -(-flat.start // row), flat.stop // row  # whole rows are first..last-1
    if first > last:  # within one row
        yield from _in_row(last, inner, flat, row)
        return
    yield from _in_row(first - 1, inner, range(flat.start, first * row), row)
    if first < last:
        yield FlatBox((first, *(0 for _ in inner)), (last - first, *inner), range(first * row, last * row))
    yield from _in_row(last, inner, range(last * row, flat.stop), row)


def _in_row(index: int, inner: tuple[int, ...], flat: range, row: int) -> Iterator[FlatBox]:
    offset = index * row
    for box in boxes(inner, range(flat.start - offset, flat.stop - offset)):
        values = range(box.flat.start + offset, box.flat.stop + offset)
        yield FlatBox((index, *box.starts), (1, *box.sizes), values)


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


class Replicated(ShardingStrategy):
    """Every data-parallel rank holds all gradients and optimizer state, and computes the same update."""

    def __init__(self, peers: ParallelGroup) -> None:
        self._peers = peers

    def updated(self, bucket: Bucket) -> range:
        """Return the whole bucket."""
        return range(len(bucket.grad))

    def start_reduce(self, bucket: Bucket) -> Pending:
        """Start an all-reduce."""
        return self._peers.start_sum(bucket.grad)

    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        """No-op: every rank has updated all parameters itself."""
        return Pending(values)


class Sharded(ShardingStrategy):
    """Each data-parallel rank updates only its own shard of every bucket."""

    def __init__(self, peers: ParallelGroup) -> None:
        self._peers = peers

    def updated(self, bucket: Bucket) -> range:
        """This rank's shard."""
        return bucket.shares[self._peers.index]

    def start_reduce(self, bucket: Bucket) -> Pending:
        """A reduce-scatter; a reduce to the owner if one rank owns the whole bucket."""
        return self._peers.start_sum_shares(bucket.grad, bucket.shares)

    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        """An all-gather; a broadcast from the owner if one rank owns the whole bucket."""
        return self._peers.start_gather_shares(values, bucket.shares)


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
    parameters of the bucket, flat. All else covers ``updated``: the parameters ``rounded``, the ``reduced`` gradients,
    and in the type ``main`` ``masters`` and ``grads``. Those are views of the former two if these have that type, and
    separate buffers otherwise.

    ``keep`` gives what stands for a tensor where the update runs: the same, or a copy in host memory. ``arrived`` is
    that of ``reduced``.
    """

    def __init__(
        self, bucket: Bucket, updated: range, owned: range, main: torch.dtype, keep: Keep = lambda tensor: tensor
    ) -> None:
        self.bucket, self.updated, self.owned = bucket, updated, owned
        self.values = bucket.flatten_parameters()
        self.rounded, self.reduced = self._kept(main)
        self.masters = keep(self.rounded).to(main)  # the same tensor, without a copy, if the types are equal
        self.arrived = keep(self.reduced)
        self.grads = self.arrived.to(main)

    @property
    def values_kept(self) -> int:
        """Bytes of parameters between steps."""
        return self.values.nbytes

    @property
    def gradients_kept(self) -> int:
        """Bytes of gradients between steps."""
        return self.bucket.grad.nbytes

    @property
    def has_masters(self) -> bool:
        """Whether the masters are a separate buffer."""
        return self.masters is not self.rounded

    @property
    def has_main_grads(self) -> bool:
        """Whether gradients are copied to a separate buffer before the update."""
        return self.grads is not self.arrived

    @property
    def main_grads_kept(self) -> int:
        """Bytes of gradients where the update runs, beside the reduced ones."""
        copies = [self.arrived] if self.on_host else []
        return sum(each.nbytes for each in (*copies, *([self.grads] if self.has_main_grads else [])))

    @property
    def on_host(self) -> bool:
        """Whether masters and main gradients lie in host memory, and the reduced gradients stay as they are."""
        return self.arrived is not self.reduced

    @property
    def measured(self) -> Tensor:
        """The gradients on the device of which norms are taken."""
        return self.reduced if self.on_host else self.grads

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
        return [self.measured[self.local(run)] for counted, run in self._by_count() if counted]

    def not_counted(self) -> list[Tensor]:
        """The gradients that this rank updates and does not add to the global norm."""
        before, after = range(self.updated.start, self.owned.start), range(self.owned.stop, self.updated.stop)
        runs = [before, *(run for counted, run in self._by_count() if not counted), after]
        return [self.measured[self.local(run)] for run in runs if run]

    def _by_count(self) -> Iterator[tuple[bool, range]]:
        return self.runs(lambda info: info.counted, self.owned)

    def pieces(self, within: range) -> Iterator[Piece]:
        """The boxes of logical tensors ``within`` a range of the bucket; padding is excluded."""
        lengths = {parameter: parameter.numel() for parameter in self.bucket.parameters}
        for parameter, found in param_ranges(self.bucket.starts, lengths, within):
            info, start = self.bucket.infos[parameter], self.bucket.starts[parameter]
            for part, starts, sizes, flat in part_boxes(parameter.shape, info.parts, found.param):
                yield Piece(info, part, starts, sizes, range(flat.start + start, flat.stop + start))

    def cut(self, flat: Tensor) -> Tensor:
        """The part that this rank updates of ``flat``, a buffer with the layout of the bucket."""
        return flat[self.updated.start : self.updated.stop]

    def _kept(self, main: torch.dtype) -> tuple[Tensor, Tensor]:
        """The parameters and the reduced gradients that this rank keeps between steps, of what it updates."""
        return self.cut(self.values), self.cut(self.bucket.grad)


def take_gradients(shards: Iterable[Shard]) -> None:
    """Copy what has arrived of gradients to ``grads`` where they do not share storage, by few kernels."""
    _copy([(shard.grads, shard.arrived) for shard in shards if shard.has_main_grads])


def give_values(shards: Iterable[Shard]) -> None:
    """Round the masters to the parameters where they do not share storage, by few kernels."""
    _copy([(shard.rounded, shard.masters) for shard in shards if shard.has_masters])


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
