"""Names and pieces of an optimizer's state, independent of the parallel layout that holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

#: The field of the fp32 weights, which exists in every precision. All other fields belong to the update rule.
MASTER = "master"


class StatePiece(NamedTuple):
    """A box of one field of a logical tensor: values ``starts[i]`` to ``starts[i] + sizes[i] - 1`` in dimension i.

    ``name`` is canonical (``Part.name``); ``field`` is :data:`MASTER` or one of the update rule (``exp_avg``, ...).
    ``tensor`` has shape ``sizes``, and is a view if possible. A number for the whole tensor, such as the step count,
    has no dimensions. Over all ranks, the pieces of a field cover the logical tensor, each value once.
    """

    name: str
    field: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor


class ReadState(Protocol):
    """Reads boxes of a saved state; they need not be the boxes of the saved :class:`StatePiece` s."""

    def __call__(self, name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box, of shape ``sizes``, of ``field`` of ``name``. Raises a RunError if it was not saved."""
        ...
