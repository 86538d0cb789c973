"""The sum of squares of a flat gradient, in float64 without its price."""

from __future__ import annotations

import torch
from torch import Tensor

#: Values whose squares are summed in fp32: so few that rounding stays far below what a coefficient could show.
_ROW = 256
#: Between these sums no square can have overflowed fp32, and what underflowed weighs nothing.
_LEAST, _MOST = 1e-20, 1e30


def sum_of_squares(flat: Tensor) -> Tensor:
    """The sum of the squares of ``flat`` [n], float64 [].

    On a CPU torch takes far longer to sum fp32 values in float64 than in fp32. So rows are summed in fp32 there, and
    the rows in float64, unless values are so large or so small that fp32 cannot hold their squares.
    """
    if flat.device.type == "cpu" and flat.dtype == torch.float32:
        rows = len(flat) // _ROW * _ROW
        total = _exact(torch.linalg.vector_norm(flat[:rows].view(-1, _ROW), dim=1)) + _exact(flat[rows:])
        if _LEAST < total < _MOST:
            return total
    return _exact(flat)


def _exact(flat: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return norm.square()
