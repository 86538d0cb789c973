"""The values that each rank updates: the arithmetic of DeepSpeed's flat groups, without DeepSpeed.

A group holds all parameters of equal hyperparameters, concatenated in the model's order. It is padded so that every
data-parallel rank gets an equal partition, which may begin and end inside a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from megatron_run_engine.optim import param_ranges, part_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.nn import Parameter

    from megatron_run.contracts import ParamInfo

#: Each rank's partition is padded to a multiple of this many values. DeepSpeed's own 2 would leave PyTorch's vectorised
#: update a remainder, which rounds differently; more than 32 would exceed the alignment of CPU memory.
ALIGNMENT = 32


class Piece(NamedTuple):
    """A box of the logical tensor ``name``, at ``local`` in the rank's partition."""

    name: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    local: slice


class Shard(NamedTuple):
    """The values ``param`` of a flattened parameter, at ``local`` in the rank's partition."""

    parameter: Parameter
    info: ParamInfo
    param: range
    local: range

    def pieces(self) -> Iterator[Piece]:
        """The boxes of logical tensors, without padding inside the parameter."""
        to_local = self.local.start - self.param.start
        for part, starts, sizes, flat in part_boxes(self.parameter.shape, self.info.parts, self.param):
            yield Piece(part.name, starts, sizes, slice(flat.start + to_local, flat.stop + to_local))


@dataclass(frozen=True, eq=False)
class FlatGroup:
    """Parameters of equal hyperparameters; ``rank`` of ``ranks`` data-parallel ranks updates one partition."""

    infos: dict[Parameter, ParamInfo]
    decays: bool
    lr_mult: float
    ranks: int
    rank: int

    @property
    def partition(self) -> int:
        """Values that each rank updates, padding included."""
        values = sum(parameter.numel() for parameter in self.infos)
        return -(-values // (ALIGNMENT * self.ranks)) * ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters in all partitions; every rank holds them."""
        return self.partition * self.ranks * next(iter(self.infos)).element_size()

    def shares(self) -> Iterator[Shard]:
        """The contents of this rank's partition in order, without the padding at its end."""
        lengths = {parameter: parameter.numel() for parameter in self.infos}
        starts = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
        mine = range(self.rank * self.partition, (self.rank + 1) * self.partition)
        for parameter, found in param_ranges(starts, lengths, mine):
            yield Shard(parameter, self.infos[parameter], found.param, found.local)


def flat_groups(
    infos: Sequence[dict[Parameter, ParamInfo]], lr_mult: Callable[[str], float], ranks: int, rank: int
) -> list[FlatGroup]:
    """The groups of a stage; ``infos[c]`` describes chunk c. A parameter shared by chunks is in one group, once."""
    grouped: dict[tuple[bool, float], dict[Parameter, ParamInfo]] = {}
    for described in infos:
        for parameter, info in described.items():
            grouped.setdefault((info.decay, lr_mult(info.name)), {})[parameter] = info
    return [FlatGroup(members, *numbers, ranks, rank) for numbers, members in grouped.items()]
