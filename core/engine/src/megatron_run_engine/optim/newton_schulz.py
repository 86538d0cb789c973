"""Orthogonalised matrices by Newton-Schulz iterations (Jordan et al. 2024), those of one shape in one product.

The arithmetic is that of ``torch.optim.Muon``, matrix by matrix, in bf16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

#: Values of a batch: on a CPU as many as its cache holds, elsewhere enough that a GPU is busy, 200 MB in all.
MOST_ON_CPU, MOST = 2**18, 2**24


def orthogonalised(matrices: Sequence[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    """Each of ``matrices``, all [r, c], as one in bf16 whose singular values are near 1.

    ``group`` has ``ns_coefficients``, ``ns_steps`` and ``eps`` of torch's Muon.
    """
    halved = [matrix.bfloat16() for matrix in matrices]
    if len(halved) == 1:  # a batch of one rounds otherwise than a product by itself
        return [_iterated(halved[0], torch.addmm, group)]
    return [*_iterated(torch.stack(halved), torch.baddbmm, group)]


def batches(matrices: Sequence[Tensor]) -> list[list[int]]:
    """The places of the ``matrices`` that :func:`orthogonalised` should take together."""
    alike: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(index)
    found = []
    for shape, members in alike.items():
        values = MOST_ON_CPU if matrices[members[0]].device.type == "cpu" else MOST
        most = max(1, values // shape.numel())
        found += [members[first : first + most] for first in range(0, len(members), most)]
    return found


def _iterated(x: Tensor, add_product: Callable[..., Tensor], group: Mapping[str, Any]) -> Tensor:
    """[r, c] by ``addmm``, or [n, r, c] by ``baddbmm``."""
    stands = x.shape[-2] > x.shape[-1]
    if stands:
        x = x.mT  # products of rows with rows are the smaller ones; a copy would round otherwise
    a, b, c = group["ns_coefficients"]
    # Matrix by matrix: a norm of bf16 values depends on how they are summed, and all else is scaled by it.
    norms = torch.stack([matrix.norm() for matrix in x]) if x.ndim > 2 else x.norm()[None]
    x = x / norms.clamp_(min=group["eps"]).view(-1, *(1 for _ in x.shape[1:]))  # the spectral norm is at most 1
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if stands else x
