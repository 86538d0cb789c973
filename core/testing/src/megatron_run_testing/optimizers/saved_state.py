"""An optimizer's state in memory as a checkpoint would hold it, assembled from its pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron_run.contracts import MASTER, StatePiece
from megatron_run_testing.check import CheckFailed

Shape = tuple[int, ...]


class SavedState:
    """Whole tensors by (name, field), assembled from the ``pieces`` of all ranks.

    ``shapes`` are the shapes of the logical tensors by name. Raises :class:`CheckFailed` unless all of them have master
    weights, and every value of every field comes exactly once.
    """

    def __init__(self, pieces: Iterable[StatePiece], shapes: Mapping[str, Shape]) -> None:
        together: dict[tuple[str, str], list[StatePiece]] = {(name, MASTER): [] for name in shapes}
        for piece in pieces:
            if piece.name not in shapes:
                raise CheckFailed(f"iter_state gives {piece.name!r}, which is not a logical tensor")
            together.setdefault((piece.name, piece.field), []).append(piece)
        self.tensors = {
            (name, field): _joined(f"{field} of {name}", found, shapes[name] if field == MASTER else _extent(found))
            for (name, field), found in together.items()
        }

    def read(self, name: str, field: str, starts: Shape, sizes: Shape) -> Tensor:
        """A box of ``field`` of ``name``. Raises :class:`CheckFailed` if it was not saved."""
        if (name, field) not in self.tensors:
            raise CheckFailed(f"load_state asks for {field} of {name}, which iter_state did not give")
        return self.tensors[name, field][_box(starts, sizes)]


def _joined(what: str, pieces: Iterable[StatePiece], shape: Shape) -> Tensor:
    whole, times = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    for piece in pieces:
        if tuple(piece.tensor.shape) != piece.sizes:
            raise CheckFailed(f"a piece of {what} has shape {tuple(piece.tensor.shape)}, but declares {piece.sizes}")
        whole = whole.to(piece.tensor.dtype)
        whole[_box(piece.starts, piece.sizes)] = piece.tensor.detach().cpu()
        times[_box(piece.starts, piece.sizes)] += 1
    if not (times == 1).all():
        wrong = times[times != 1]
        raise CheckFailed(f"{len(wrong)} values of {what} are given {int(wrong[0])} times, expected once")
    return whole


def _extent(pieces: Iterable[StatePiece]) -> Shape:
    """The smallest shape that contains all ``pieces``; a field's shape may differ from its tensor's."""
    ends = [[start + size for start, size in zip(piece.starts, piece.sizes, strict=True)] for piece in pieces]
    return tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])


def _box(starts: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
