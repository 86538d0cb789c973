"""Cuts whole samples, which every context-parallel rank reads, into the tokens that one computes, and joins them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import Pieces

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Field
    from megatron_run_engine.runtime.comm import ParallelGroup


@dataclass(frozen=True)
class SampleCut:
    """Cuts fields into ``pieces``, each along the dimension of a batch [b, *shape] in which it is by token.

    ``dimensions`` has them by the names of fields; the others, such as the bounds of documents, stay whole.
    """

    pieces: Pieces = field(default_factory=Pieces)
    dimensions: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, pieces: Pieces, fields: Iterable[Field]) -> SampleCut:
        """That of ``fields``, which are by token where their shape has ``"s"``."""
        by_token = {each.name: 1 + each.shape.index("s") for each in fields if "s" in each.shape}
        return cls(pieces, by_token if pieces.ranks > 1 else {})

    def __call__(self, name: str, rows: Tensor) -> Tensor:
        """The pieces of the field ``name`` in ``rows`` [b, *shape]."""
        dimension = self.dimensions.get(name)
        return rows if dimension is None else held(rows, self.pieces, dimension)


def held(whole: Tensor, pieces: Pieces, dimension: int = 0, index: int | None = None) -> Tensor:
    """The part of this rank, or of that of ``index``, along ``dimension``: [..., s, ...] -> [..., s/C, ...]."""
    columns = pieces.columns(whole.shape[dimension], index)
    parts = [whole.narrow(dimension, each.start, len(each)) for each in columns]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)


def gathered(part: Tensor, pieces: Pieces, peers: ParallelGroup, dimension: int = 0) -> Tensor:
    """The whole of which every rank has a part: [..., s/C, ...] -> [..., s, ...] along ``dimension``. Collective."""
    if pieces.ranks == 1:
        return part
    return joined(peers.gather(part.movedim(dimension, 0)), pieces).movedim(0, dimension)


def joined(parts: Tensor, pieces: Pieces) -> Tensor:
    """The inverse of :func:`held` along the first dimension: [s, ...] of all ranks' parts, one after the other."""
    if pieces.ranks == 1:
        return parts
    columns = [each.start for index in range(pieces.ranks) for each in pieces.columns(len(parts), index)]
    each = parts.split(len(parts) // (2 * pieces.ranks))
    return torch.cat([each[place] for place in sorted(range(len(each)), key=columns.__getitem__)])
