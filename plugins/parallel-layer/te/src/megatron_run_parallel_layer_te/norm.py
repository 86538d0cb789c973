"""Norms of Transformer Engine, alone or fused into the following product.

Legend: h features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron_run.contracts import Init, ParameterSpec

if TYPE_CHECKING:
    from megatron_run.contracts import NormKind
    from megatron_run_parallel_layer_te.tools import Tools


class Norm(nn.Module):
    """Layer norm or RMS norm over the last dimension.

    Fused into a product it computes nothing, and only gives the product's norm parameters their names.
    """

    def __init__(self, tools: Tools, kind: NormKind, size: int, eps: float) -> None:
        super().__init__()
        self.normalization, self.eps = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[kind.removesuffix("_1p")], eps
        #: What the library's norms take besides, alone or fused.
        self.form = {"zero_centered_gamma": True} if kind.endswith("_1p") else {}
        make = getattr(tools.engine.pytorch, self.normalization)
        module = make(size, eps=eps, dtype=tools.context.dtypes.param, device=tools.device, **self.form)
        self._hold(module.weight, module.bias if self.normalization == "LayerNorm" else None)
        self.module: nn.Module | None = module
        self.parameter_specs = {
            "weight": tools.split.whole(ParameterSpec(Init("zeros" if self.form else "ones"))),
            "bias": tools.split.whole(ParameterSpec(Init("zeros"))),
        }

    def forward(self, x: Tensor) -> Tensor:
        """[*, h] -> [*, h]."""
        assert self.module is not None, "this norm is computed by the product that it was fused into"
        result: Tensor = self.module(x)
        return result

    def fuse_into(self, product: Any) -> None:
        """Let ``product``, a LayerNormLinear, compute this norm, and adopt its norm parameters."""
        self._hold(product.layer_norm_weight, product.layer_norm_bias if self.bias is not None else None)
        self.module = None

    def _hold(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight, self.bias = weight, bias
