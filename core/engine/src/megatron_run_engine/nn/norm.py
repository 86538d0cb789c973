"""Layer norm (Ba, Kiros and Hinton 2016) and root-mean-square norm (Zhang and Sennrich 2019), over the last dimension.

Legend: h features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import Init, ParameterSpec
from megatron_run_engine.nn.parameter import empty_parameter

if TYPE_CHECKING:
    from megatron_run_engine.runtime.context import BuildContext


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``: [*, h] -> [*, h]."""

    def __init__(self, context: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(context, size)
        self.bias = empty_parameter(context, size)
        self.parameter_specs = {"weight": ParameterSpec(Init("ones")), "bias": ParameterSpec(Init("zeros"))}

    def forward(self, x: Tensor) -> Tensor:
        """[*, h] -> [*, h]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RmsNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``: [*, h] -> [*, h]."""

    def __init__(self, context: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(context, size)
        self.parameter_specs = {"weight": ParameterSpec(Init("ones"))}

    def forward(self, x: Tensor) -> Tensor:
        """[*, h] -> [*, h]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
