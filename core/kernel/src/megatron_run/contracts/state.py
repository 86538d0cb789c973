"""How an optimizer's state is named and cut, whatever the parallel layout that holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

#: The field of the fp32 weights, which exists whatever the precision. All others are the update rule's own.
MASTER = "master"


class StatePiece(NamedTuple):
    """A box of a field of a logical tensor: values ``starts[i]`` to ``starts[i] + sizes[i] - 1`` in each dimension i.

    ``name`` is canonical (``Part.name``), ``field`` is :data:`MASTER` or the update rule's (``exp_avg``, ...).
    ``tensor`` has shape ``sizes`` and is a view where it can be. A number that belongs to the whole tensor, as the
    count of steps, has no dimensions. Over all ranks the pieces of one field cover the logical tensor, each value once.
    """

    name: str
    field: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor


class ReadState(Protocol):
    """Looks up what :class:`StatePiece` s said when the state was saved, in boxes that need not be theirs."""

    def __call__(self, name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """The box of ``field`` of ``name``, of shape ``sizes``. Raises a RunError for what was not saved."""
        ...
