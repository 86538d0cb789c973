"""The values that each rank updates: the arithmetic of DeepSpeed's flat groups, without DeepSpeed.

A group holds all parameters of equal hyperparameters, concatenated in the model's order. It is padded so that every
data-parallel rank gets an equal partition, which may begin and end inside a parameter. Master weights and moments are
converted between partitions and boxes of logical tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_run.contracts import MASTER, StatePiece
from megatron_run_engine.optim import param_ranges, part_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.nn import Parameter

    from megatron_run.contracts import ParamInfo, ReadState


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
        partition = range(self.rank * self.partition, (self.rank + 1) * self.partition)
        for parameter, found in param_ranges(starts, lengths, partition):
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


def iter_state(group: FlatGroup, master: Tensor, state: Mapping[str, Any]) -> Iterator[StatePiece]:
    """The pieces that this rank saves of its partition of ``group``: the flat ``master`` and PyTorch's ``state`` of it.

    The rank that holds a logical tensor's first value also saves the numbers of the whole tensor.
    """
    for share in group.shares():
        for piece in share.pieces() if share.info.counted else ():
            for field, flat in _by_value(master, state).items():
                yield StatePiece(piece.name, field, piece.starts, piece.sizes, flat[piece.local].view(piece.sizes))
            if not any(piece.starts):
                for field, number in _numbers(master, state).items():
                    yield StatePiece(piece.name, field, (), (), number)


@torch.no_grad()
def load_state(group: FlatGroup, master: Tensor, state: Mapping[str, Any], read: ReadState) -> None:
    """Fill the existing ``master`` and ``state`` from the boxes that ``read`` looks up."""
    for index, share in enumerate(group.shares()):
        for piece in share.pieces():
            for field, flat in _by_value(master, state).items():
                flat[piece.local].copy_(read(piece.name, field, piece.starts, piece.sizes).flatten())
        if index == 0:  # all shares of a group were updated in the same steps: one count serves all
            for field, number in _numbers(master, state).items():
                number.copy_(read(share.info.parts[0].name, field, (), ()))


def _by_value(master: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    alike = {field: value for field, value in state.items() if _is_alike(master, value)}
    return {MASTER: master.detach(), **alike}


def _numbers(master: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """State without a value per weight: the count of steps."""
    return {
        field: value for field, value in state.items() if isinstance(value, Tensor) and not _is_alike(master, value)
    }


def _is_alike(master: Tensor, value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape
