"""Dropout, as PyTorch has it, which keeps what the device that it is planned for would keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_run_engine.nn.device import stands_for_gpu


class Dropout(nn.Dropout):
    """Zero with probability p, otherwise scaled by 1 / (1 - p), drawn from the device's default generator.

    For the backward a GPU keeps a byte a value, and a CPU the mask in the values' own type.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[*] -> [*]; x itself in evaluation."""
        if self.training and self.p and stands_for_gpu(x):
            result: Tensor = torch.native_dropout(x, self.p, True)[0]  # torch's
            return result
        return super().forward(x)
