"""Flat gradient storage: parameters in reverse order, cut into buckets, padded so that all shards are equal.

All optimizers use this layout, sharded or not. A reduce-scatter of a bucket over gloo then equals an all-reduce of it
bit for bit, and so do the trained weights.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatron_run_engine.runtime.gradients import give_main_grad
from megatron_run_engine.runtime.parameter_init import has_memory, take_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import ParamInfo
    from megatron_run.contracts.topology import Replicas

#: Every parameter starts at a multiple of this many values (256 bytes of fp32), as vectorised kernels prefer.
ALIGNMENT = 64
#: A bucket is closed once it holds this many values: large enough for bandwidth, small enough to overlap.
DEFAULT_CAPACITY = 2**22


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that are reduced together.

    ``grad`` is flat, and its length is divisible by the number of shards; ``starts`` maps each parameter to its offset.
    ``parameter.main_grad`` is a view of ``grad``, for life unless it is lent. ``chunk`` is the chunk whose backward
    fills the bucket, or None for a tied parameter, to which several chunks or stages add. ``shares[r]`` is the range
    that rank r of ``replicas`` owns: the shares cover the bucket, each value once.
    """

    chunk: int | None
    grad: Tensor
    starts: dict[Parameter, int]
    infos: dict[Parameter, ParamInfo] = field(repr=False)
    shares: tuple[range, ...]

    @property
    def replicas(self) -> Replicas:
        """The axis whose ranks hold the same bucket and reduce it together."""
        return next(iter(self.infos.values())).replicas

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in the order of the buffer, the reverse of the model's."""
        return tuple(self.starts)

    def view(self, flat: Tensor, parameter: Parameter) -> Tensor:
        """The values of ``parameter`` in ``flat``, a buffer with the layout of ``grad``, in the parameter's shape."""
        start = self.starts[parameter]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def flatten_parameters(self) -> Tensor:
        """Move the parameters into one buffer with the layout of ``grad``; each becomes a view of it.

        Those that have no memory yet get zeros.
        """
        # Zeros, since padding is updated and gathered with the rest: it must stay finite.
        flat = self.grad.new_zeros(len(self.grad), dtype=self.parameters[0].dtype)
        for parameter in self.parameters:
            view = self.view(flat, parameter)
            if has_memory(parameter):
                view.copy_(parameter.data)
            parameter.data = view  # .data: the Parameter stays the same object for its module
        return flat


def build_buckets(
    infos: Sequence[dict[Parameter, ParamInfo]],
    shards: int,
    dtype: torch.dtype | None = torch.float32,
    capacity: int = DEFAULT_CAPACITY,
    *,
    whole: bool = False,
    expert_shards: int | None = None,
    lent: bool = False,
) -> list[Bucket]:
    """Build the buckets of a stage and set every ``main_grad`` to a view of one.

    ``infos[c]`` describes the parameters of chunk c. Within a chunk, parameters are in reverse order, since a backward
    produces gradients in that order, and those that differ in ``partial_over``, ``replicas`` or type are in different
    buckets. A tied parameter has a bucket of its own, so that every stage that holds it has the same layout. ``dtype``
    is the type of gradients, None for the parameters' own.

    ``shards`` is the data-parallel size; ``expert_shards`` is the number of its ranks that hold the same experts, by
    default all. Each bucket is cut into that many equal shares or, with ``whole``, owned by a single rank, so that no
    parameter is cut. With ``lent`` gradients get no memory yet.
    """
    buckets: list[Bucket] = []
    shares: dict[Replicas, _Shares] = {
        "replicas": _Shares(shards, whole=whole),
        "expert_replicas": _Shares(expert_shards or shards, whole=whole),
    }
    seen: set[Parameter] = set()
    for chunk, described in enumerate(infos):
        fresh = [(p, info) for p, info in reversed(described.items()) if p not in seen]
        seen.update(described)
        buckets += [_bucket(None, [item], shares, dtype, lent=lent) for item in fresh if item[1].tie]
        untied = [item for item in fresh if not item[1].tie]
        for key in dict.fromkeys(map(_bucket_key, untied)):
            members = [item for item in untied if _bucket_key(item) == key]
            buckets += [_bucket(chunk, part, shares, dtype, lent=lent) for part in _cut(members, capacity)]
    return buckets


class _Shares:
    """Assigns the values of buckets to ``ranks`` replicas: equal shares or, with ``whole``, one owner per bucket.

    A whole bucket goes to the rank with the fewest values so far.
    """

    def __init__(self, ranks: int, *, whole: bool) -> None:
        self._load, self._whole = [0] * ranks, whole

    def cut(self, values: int, tie: str) -> tuple[range, ...]:
        """Each rank's share of a bucket of at least ``values``, padded so that equal shares are aligned.

        The owner of a whole tied parameter follows from a hash of the name of its tie, not from the loads: these
        differ between the stages that hold a copy, which must choose the same owner.
        """
        ranks = len(self._load)
        length = _align(values, ALIGNMENT * ranks)
        if not self._whole:
            size = length // ranks
            return tuple(range(rank * size, (rank + 1) * size) for rank in range(ranks))
        owner = zlib.crc32(tie.encode()) % ranks if tie else self._load.index(min(self._load))
        self._load[owner] += length
        return tuple(range(length) if rank == owner else range(0) for rank in range(ranks))


def _bucket_key(member: tuple[Parameter, ParamInfo]) -> tuple[object, ...]:
    """The common traits of a bucket's members: they are reduced by the same collective."""
    parameter, info = member
    return info.partial_over, info.replicas, parameter.dtype


def _cut(members: list[tuple[Parameter, ParamInfo]], capacity: int) -> list[list[tuple[Parameter, ParamInfo]]]:
    """Cut ``members`` into buckets: one ends with the parameter that brings it to ``capacity`` values."""
    parts: list[list[tuple[Parameter, ParamInfo]]] = [[]]
    filled = 0
    for member in members:
        if filled >= capacity:
            parts.append([])
            filled = 0
        parts[-1].append(member)
        filled += _align(member[0].numel(), ALIGNMENT)
    return parts


def _bucket(
    chunk: int | None,
    members: list[tuple[Parameter, ParamInfo]],
    shares: Mapping[Replicas, _Shares],
    dtype: torch.dtype | None,
    *,
    lent: bool,
) -> Bucket:
    starts: dict[Parameter, int] = {}
    length = 0
    for parameter, _ in members:
        starts[parameter] = length
        length += _align(parameter.numel(), ALIGNMENT)
    first, info = members[0]
    ranges = shares[info.replicas].cut(length, info.tie)
    grad = torch.zeros(sum(map(len, ranges)), dtype=dtype or first.dtype, device=first.device)
    bucket = Bucket(chunk, grad, starts, dict(members), ranges)
    for parameter in starts:
        give_main_grad(parameter, bucket.view(bucket.grad, parameter))
    if lent:  # at once, so that no two are there
        take_memory(grad)
    return bucket


def _align(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
