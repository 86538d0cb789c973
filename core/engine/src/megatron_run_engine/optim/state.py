"""Converts master weights and the rule's state between flat segments and boxes of logical tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_run.contracts import MASTER, StatePiece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from megatron_run.contracts import ReadState
    from megatron_run_engine.optim.sharding import Piece
    from megatron_run_engine.optim.update import Segment, Update


def iter_state(update: Update) -> Iterator[StatePiece]:
    """Yield the state that this rank owns. State of a whole logical tensor belongs to the owner of its first value.

    A run may be saved before its first update. A user's own rule then has masters only.
    """
    update.begin()
    for segment in update.segments:
        share, state = segment.share, update.state(segment)
        owned = range(max(segment.world.start, share.owned.start), min(segment.world.stop, share.owned.stop))
        for piece in share.pieces(owned):
            if not piece.info.counted:
                continue
            for field, flat in _by_value(segment, state).items():
                box = flat[_within(segment, piece)].view(piece.sizes)
                yield StatePiece(piece.part.name, field, piece.starts, piece.sizes, box)
            if piece.is_first:
                for field, value in _of_the_whole(segment, state).items():
                    tensor = torch.as_tensor(value)
                    yield StatePiece(piece.part.name, field, (0,) * tensor.ndim, tuple(tensor.shape), tensor)


def load_state(update: Update, read: ReadState) -> None:
    """Fill masters and state of every segment with boxes from ``read``."""
    update.start()
    _fill(update, read)


def load_weights(update: Update, read: ReadState) -> None:
    """Fill the masters of every segment with boxes from ``read``, and clear the rule's state."""
    update.forget()
    _fill(update, read)


@torch.no_grad()
def _fill(update: Update, read: ReadState) -> None:
    """Fill the masters, and the state that the rule has."""
    for segment in update.segments:
        state = update.state(segment)
        for index, piece in enumerate(segment.share.pieces(segment.world)):
            for field, flat in _by_value(segment, state).items():
                flat[_within(segment, piece)].copy_(read(piece.part.name, field, piece.starts, piece.sizes).flatten())
            if index == 0:  # equal for all logical tensors of a segment: they have been updated together
                _load_whole(update, segment, piece.part.name, read)


def _load_whole(update: Update, segment: Segment, name: str, read: ReadState) -> None:
    for field, value in _of_the_whole(segment, update.state(segment)).items():
        if isinstance(value, Tensor):
            value.copy_(read(name, field, (0,) * value.ndim, tuple(value.shape)))
        else:
            update.set_state(segment, field, type(value)(read(name, field, (), ()).item()))


def _by_value(segment: Segment, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the masters, and the state with one number per value of ``segment``, flat."""
    alike = {field: value for field, value in state.items() if _is_alike(segment, value)}
    return {field: tensor.detach().view(-1) for field, tensor in {MASTER: segment.values, **alike}.items()}


def _of_the_whole(segment: Segment, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other state: counters, and state of other shapes for a whole tensor."""
    return {field: value for field, value in state.items() if not _is_alike(segment, value)}


def _is_alike(segment: Segment, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == segment.values.shape


def _within(segment: Segment, piece: Piece) -> slice:
    return slice(piece.world.start - segment.world.start, piece.world.stop - segment.world.start)
