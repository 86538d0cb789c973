"""The edges of a tensor-parallel region: conjugate pairs of autograd functions.

``f`` and ``g`` are those of Shoeybi et al. 2019 ("Megatron-LM"), section 3. Under sequence parallelism
``gather_sequence`` and ``scatter_sequence`` replace them (Korthikanti et al. 2022, "Reducing Activation Recomputation
in Large Transformer Models", section 4.2). An all-reduce equals a reduce-scatter plus an all-gather, so both pairs move
the same bytes.

| | forward | backward |
|---|---|---|
| ``f`` | nothing | all-reduce |
| ``g`` | all-reduce | nothing |
| ``gather_sequence`` | all-gather | reduce-scatter |
| ``scatter_sequence`` | reduce-scatter | all-gather |

Legend: s sequence, t tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_run_engine.runtime.comm import ParallelGroup


def f(x: Tensor, peers: ParallelGroup) -> Tensor:
    """Enter the region: all peers hold the same x [*]; the backward sums their gradients."""
    result: Tensor = _F.apply(x, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


def g(x: Tensor, peers: ParallelGroup) -> Tensor:
    """Leave the region: sum the peers' partial results x [*], in place."""
    result: Tensor = _G.apply(x, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


def gather_sequence(x: Tensor, peers: ParallelGroup) -> Tensor:
    """Enter the region with the whole sequence: [s/t, *] -> [s, *]."""
    result: Tensor = _GatherSequence.apply(x, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


def scatter_sequence(x: Tensor, peers: ParallelGroup) -> Tensor:
    """Leave the region with this rank's part of the sequence, summed over the peers: [s, *] -> [s/t, *]."""
    result: Tensor = _ScatterSequence.apply(x, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ParallelGroup) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd forbids changing grads[0] in place, and it may be an expanded or shared tensor.
        return ctx.peers.sum_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ParallelGroup) -> Tensor:
        ctx.mark_dirty(x)
        return peers.sum_(x)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None  # all peers hold the same gradient, that of the summed result


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ParallelGroup) -> Tensor:
        ctx.peers = peers
        return peers.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.scatter_sum(grads[0]), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ParallelGroup) -> Tensor:
        ctx.peers = peers
        return peers.scatter_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.gather(grads[0]), None
