"""Saving and loading of master weights and of the rule's state, as boxes of logical tensors."""

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
    """The state that this rank owns; a field of a whole logical tensor belongs to the owner of its first value.

    A run may be saved before its first update. An imported rule (``MODULE:CLASS``) then has master weights only, since
    its initial state is not known.
    """
    update.create_initial_state()
    for segment in update.segments:
        shard, state = segment.shard, update.state(segment)
        owned = range(max(segment.in_bucket.start, shard.owned.start), min(segment.in_bucket.stop, shard.owned.stop))
        for piece in shard.pieces(owned):
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
    """Fill master weights and state of every segment from the boxes that ``read`` looks up."""
    update.allocate_state()
    _fill(update, read)


def load_weights(update: Update, read: ReadState) -> None:
    """Fill the master weights of every segment from the boxes that ``read`` looks up, and drop the rule's state."""
    update.drop_state()
    _fill(update, read)


@torch.no_grad()
def _fill(update: Update, read: ReadState) -> None:
    """Fill the master weights, and the state if the rule has any."""
    for segment in update.segments:
        state = update.state(segment)
        for index, piece in enumerate(segment.shard.pieces(segment.in_bucket)):
            for field, flat in _by_value(segment, state).items():
                flat[_within(segment, piece)].copy_(read(piece.part.name, field, piece.starts, piece.sizes).flatten())
            if index == 0:  # equal for all logical tensors of a segment, since they are updated together
                _load_whole_fields(update, segment, piece.part.name, read)


def _load_whole_fields(update: Update, segment: Segment, name: str, read: ReadState) -> None:
    for field, value in _of_the_whole(segment, update.state(segment)).items():
        if isinstance(value, Tensor):
            value.copy_(read(name, field, (0,) * value.ndim, tuple(value.shape)))
        else:
            update.set_state(segment, field, type(value)(read(name, field, (), ()).item()))


def _by_value(segment: Segment, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The fields with one number for each value of ``segment``, the master weights among them, flat."""
    elementwise = {field: value for field, value in state.items() if _is_elementwise(segment, value)}
    return {field: tensor.detach().view(-1) for field, tensor in {MASTER: segment.values, **elementwise}.items()}


def _of_the_whole(segment: Segment, state: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields: counters, and tensors of any other shape."""
    return {field: value for field, value in state.items() if not _is_elementwise(segment, value)}


def _is_elementwise(segment: Segment, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == segment.values.shape


def _within(segment: Segment, piece: Piece) -> slice:
    return slice(piece.in_bucket.start - segment.in_bucket.start, piece.in_bucket.stop - segment.in_bucket.start)
