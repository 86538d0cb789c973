"""Flat gradient storage: parameters in reverse order, cut into buckets, padded so that every shard is equal.

All optimizers share this layout. With it, on gloo, a reduce-scatter of a bucket equals its all-reduce bit for bit.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import ParamInfo
    from megatron_run.contracts.topology import Replicas

#: Every parameter starts at a multiple of this many values (256 bytes of fp32), the alignment of fused kernels.
ALIGNMENT = 64
#: A bucket is closed once it holds this many values: large enough for bandwidth, small enough for overlap.
DEFAULT_CAPACITY = 2**22
_ATTRIBUTE = "main_grad"  # the field's own name; other libraries' layers look for it too


def main_grad(parameter: Tensor) -> Tensor:
    """Return the tensor that accumulates the gradient of ``parameter``. Its storage never changes."""
    grad: Tensor = getattr(parameter, _ATTRIBUTE)
    return grad


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that are reduced together.

    ``grad`` is flat, of a length divisible by the number of shards. ``starts`` maps each parameter to its offset.
    ``parameter.main_grad`` is a permanent view of ``grad``. ``chunk`` is the chunk whose backward fills it, or None for
    a tied parameter, to which other chunks or stages add. ``shares[r]`` are the values that rank r of ``replicas``
    owns. Together the shares hold each value of the bucket once.
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
        """The parameters in the order of the buffer, which is the reverse of the model's."""
        return tuple(self.starts)

    def view(self, flat: Tensor, parameter: Parameter) -> Tensor:
        """Return the values of ``parameter`` in ``flat``, a buffer with the layout of ``grad``, in its shape."""
        start = self.starts[parameter]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def flatten_parameters(self) -> Tensor:
        """Move the parameters into one buffer with the layout of ``grad``. Each becomes a view of it, values kept."""
        flat = self.grad.new_zeros(len(self.grad), dtype=self.parameters[0].dtype)
        for parameter in self.parameters:
            view = self.view(flat, parameter)
            parameter.data = view.copy_(parameter.data)
        return flat


def build_buckets(
    infos: Sequence[dict[Parameter, ParamInfo]],
    shards: int,
    dtype: torch.dtype | None = torch.float32,
    capacity: int = DEFAULT_CAPACITY,
    *,
    whole: bool = False,
    expert_shards: int | None = None,
) -> list[Bucket]:
    """Make the buckets of a stage and point every ``main_grad`` into them.

    ``infos[c]`` describes the parameters of chunk c. Within a chunk parameters lie in reverse order, the order in which
    a backward produces gradients. Parameters with another ``partial_over``, ``replicas`` or type have buckets of their
    own. A tied parameter has its own bucket, so that every stage with a copy has the same layout. ``dtype`` is the type
    of gradients, None for the parameters' own.

    ``shards`` is the data-parallel size. ``expert_shards`` is the number of data-parallel ranks that hold the same
    experts; unset, all do. Each bucket is cut into that many equal shares. With ``whole``, which keeps parameters
    whole, each bucket belongs to one rank instead.
    """
    buckets: list[Bucket] = []
    shares: dict[Replicas, _Shares] = {
        "data": _Shares(shards, whole=whole),
        "expert_data": _Shares(expert_shards or shards, whole=whole),
    }
    seen: set[Parameter] = set()
    for chunk, described in enumerate(infos):
        fresh = [(p, info) for p, info in reversed(described.items()) if p not in seen]
        seen.update(described)
        buckets += [_bucket(None, [item], shares, dtype) for item in fresh if item[1].tie]
        untied = [item for item in fresh if not item[1].tie]
        for alike in dict.fromkeys(map(_alike, untied)):
            members = [item for item in untied if _alike(item) == alike]
            buckets += [_bucket(chunk, part, shares, dtype) for part in _cut(members, capacity)]
    return buckets


class _Shares:
    """Shares buckets over ``ranks`` replicas: cut into equal shares, or ``whole`` to the rank with the least so far."""

    def __init__(self, ranks: int, *, whole: bool) -> None:
        self._load, self._whole = [0] * ranks, whole

    def cut(self, values: int, tie: str) -> tuple[range, ...]:
        """Return each rank's share of a bucket of at least ``values``, padded so that equal shares are aligned."""
        ranks = len(self._load)
        length = _align(values, ALIGNMENT * ranks)
        if not self._whole:
            size = length // ranks
            return tuple(range(rank * size, (rank + 1) * size) for rank in range(ranks))
        # Stages that hold copies of a tied parameter have different loads but must agree on its owner: hash its name.
        owner = zlib.crc32(tie.encode()) % ranks if tie else self._load.index(min(self._load))
        self._load[owner] += length
        return tuple(range(length) if rank == owner else range(0) for rank in range(ranks))


def _alike(member: tuple[Parameter, ParamInfo]) -> tuple[object, ...]:
    """Return what the members of a bucket must have in common."""
    parameter, info = member
    return info.partial_over, info.replicas, parameter.dtype


def _cut(members: list[tuple[Parameter, ParamInfo]], capacity: int) -> list[list[tuple[Parameter, ParamInfo]]]:
    """Cut ``members`` into buckets, each closed after the member that fills it."""
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
) -> Bucket:
    starts: dict[Parameter, int] = {}
    length = 0
    for parameter, _ in members:
        starts[parameter] = length
        length += _align(parameter.numel(), ALIGNMENT)
    first, info = members[0]
    mine = shares[info.replicas].cut(length, info.tie)
    grad = torch.zeros(sum(map(len, mine)), dtype=dtype or first.dtype, device=first.device)
    bucket = Bucket(chunk, grad, starts, dict(members), mine)
    for parameter in starts:
        setattr(parameter, _ATTRIBUTE, bucket.view(bucket.grad, parameter))
    return bucket


def _align(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
