"""Dropout outside tensor-parallel regions: every rank computes the same activations, so every rank drops the same ones.

Inside a region each rank has activations of its own and drops them by the device's default stream, which the kernel
positions differently on every rank (Shoeybi et al. 2019, appendix B.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron_run_engine.runtime.rng import RandomStreams


class ReplicatedDropout(nn.Module):
    """Draws from the replicated stream, which the kernel positions alike on every tensor-parallel rank.

    Like torch's own it keeps one byte a value for the backward.
    """

    def __init__(self, p: float, streams: RandomStreams) -> None:
        super().__init__()
        self.p, self.streams = p, streams

    def forward(self, x: Tensor) -> Tensor:
        """[*] -> [*]: zeros with probability p, the rest grown by 1 / (1 - p); x itself in evaluation."""
        if not self.training or not self.p:
            return x
        result: Tensor = _Dropout.apply(x, self.p, self.streams.replicated)  # type: ignore[no-untyped-call]  # torch's
        return result

    def extra_repr(self) -> str:
        """As torch's own dropout shows itself."""
        return f"p={self.p}"


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, generator: torch.Generator) -> Tensor:
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
        ctx.save_for_backward(kept)
        ctx.p = p
        return _keep(x, kept, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return _keep(grads[0], kept, ctx.p), None, None


def _keep(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """What is ``kept`` of x, grown; in 16 bit it is rounded once, after the product with the exact factor."""
    return (x * kept).mul_(1 / (1 - p))
