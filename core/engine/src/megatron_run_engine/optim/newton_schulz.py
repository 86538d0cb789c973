"""Orthogonalised matrices by Newton-Schulz iterations (Jordan et al. 2024), those of one shape in one product.

The arithmetic is that of ``torch.optim.Muon``, matrix by matrix, in bf16.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

#: Values of a batch: enough that a GPU is busy, and what the iterations hold at a time stays below 200 MB.
MOST_VALUES = 2**24


def orthogonalised(matrices: Sequence[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    """Each of ``matrices``, of one shape or its transpose, as one in bf16 whose singular values are near 1.

    ``group`` has ``ns_coefficients``, ``ns_steps`` and ``eps`` of torch's Muon.
    """
    together = _iterated(torch.stack([_lying(matrix) for matrix in matrices]), group)
    return [result.T if _stands(matrix) else result for matrix, result in zip(matrices, together, strict=True)]


def batches(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The places of ``shapes`` whose matrices :func:`orthogonalised` should take together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        alike.setdefault(tuple(sorted(shape)), []).append(index)
    found = []
    for sides, members in alike.items():
        most = max(1, MOST_VALUES // prod(sides))
        found += [members[first : first + most] for first in range(0, len(members), most)]
    return found


def _stands(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _lying(matrix: Tensor) -> Tensor:
    """``matrix`` in bf16, with as few rows as may be: products of rows with rows are then the smaller ones."""
    return (matrix.T if _stands(matrix) else matrix).bfloat16()


def _iterated(x: Tensor, group: Mapping[str, Any]) -> Tensor:
    """[n, r, c] with r <= c, in place where it can be."""
    a, b, c = group["ns_coefficients"]
    # Matrix by matrix: a norm of bf16 values depends on how they are summed, and all else is scaled by it.
    norms = torch.stack([matrix.norm() for matrix in x])
    x /= norms.clamp_(min=group["eps"])[:, None, None]  # the spectral norm is at most 1
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
