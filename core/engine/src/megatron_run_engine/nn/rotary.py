"""Rotary positions (Su et al. 2021), in the half-split form: feature j is rotated together with feature j + d/2.

Legend: s sequence, b micro batch, n heads, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_run_engine.nn.parameter import build_device

if TYPE_CHECKING:
    from megatron_run_engine.nn.spec import TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext


class Rotary(nn.Module):
    """Turns the features of position ``i`` by the angles ``i * theta^(-2j/d)``; one table serves all layers."""

    cos: Tensor  # [s, 1, 1, d/2]
    sin: Tensor  # [s, 1, 1, d/2]

    def __init__(self, context: BuildContext, spec: TransformerSpec) -> None:
        super().__init__()
        device = build_device(context)
        exponents = torch.arange(0, spec.head_size, 2, dtype=torch.float64, device=device) / spec.head_size
        positions = torch.arange(spec.sequence_length, dtype=torch.float64, device=device)
        angles = torch.outer(positions, spec.rope_theta**-exponents)[:, None, None, :]
        self.register_buffer("cos", angles.cos().to(context.dtypes.param), persistent=False)
        self.register_buffer("sin", angles.sin().to(context.dtypes.param), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate queries or keys: [s, b, n, d] -> [s, b, n, d]."""
        cos, sin = self.cos[: len(x)], self.sin[: len(x)]
        first, second = x.chunk(2, dim=-1)  # each [s, b, n, d/2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
