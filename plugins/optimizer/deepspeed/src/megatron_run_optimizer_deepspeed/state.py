"""Converts master weights and moments between DeepSpeed's partitions and boxes of logical tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_run.contracts import MASTER, StatePiece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from megatron_run.contracts import ReadState
    from megatron_run_optimizer_deepspeed.partitions import FlatGroup


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
