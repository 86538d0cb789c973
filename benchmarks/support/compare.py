"""Whether two sides computed the same thing: asked before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: How far the tensors of two sides may lie apart, relative to the largest value of each tensor.
TOLERANCE = 1e-5


def compare(
    own: Mapping[str, Tensor], peer: Mapping[str, Tensor], tolerance: float = TOLERANCE, least: float = 0.0
) -> float:
    """How far the tensors of two sides lie apart at most, each relative to its largest value, or ``least`` if larger.

    A gradient that is zero but for rounding has no scale of its own: for such ``least`` stands in. Raises
    :class:`ValueError` when they lie apart more than ``tolerance``, and for anything that no difference can be told of:
    a tensor that one side lacks, another shape, a value that is not finite.
    """
    if own.keys() != peer.keys():
        raise ValueError(f"the two sides do not hold the same tensors: {sorted(own.keys() ^ peer.keys())}")
    farthest = 0.0
    for name, one in own.items():
        other = peer[name]
        if one.shape != other.shape:
            raise ValueError(f"{name} is {tuple(one.shape)} on our side and {tuple(other.shape)} on theirs")
        if not (one.isfinite().all() and other.isfinite().all()):
            raise ValueError(f"{name} is not finite")
        # a tensor may be zero on both sides
        largest = max(other.abs().max().item(), least, torch.finfo(other.dtype).tiny)
        apart = (one - other).abs().max().item() / largest
        if not apart <= tolerance:
            raise ValueError(f"{name} differs by {apart:.1e} of its largest value")
        farthest = max(farthest, apart)
    return farthest
