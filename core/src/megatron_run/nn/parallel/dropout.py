"""Dropout outside tensor-parallel regions: every rank computes the same activations, so every rank drops the same ones.

Inside a region each rank has activations of its own and drops them by the device's default stream, which the kernel
positions differently on every rank (Shoeybi et al. 2019, appendix B.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron_run.rng import RandomStreams


class ReplicatedDropout(nn.Module):
    """Draws from the replicated stream, which the kernel positions alike on every tensor-parallel rank."""

    def __init__(self, p: float, streams: RandomStreams) -> None:
        super().__init__()
        self.p, self.streams = p, streams

    def forward(self, x: Tensor) -> Tensor:
        """[*] -> [*]: zeros with probability p, the rest grown by 1 / (1 - p); x itself in evaluation."""
        if not self.training or not self.p:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.streams.replicated)
        return x * kept.div_(1 - self.p)

    def extra_repr(self) -> str:
        """As torch's own dropout shows itself."""
        return f"p={self.p}"
