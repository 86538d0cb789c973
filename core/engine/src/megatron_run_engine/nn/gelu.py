"""GeLU (Hendrycks and Gimpel 2016), alone or as the end of a linear layer whose bias it then brings the gradient of.

The gradient of such a bias is the column sums of the gradient that GeLU's backward writes. Where both are a layer's,
one kernel writes that gradient and adds it up, instead of another pass over a tensor as wide as the feed-forward layer.

Legend: * any leading dimensions, N their product, f features, u terms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run_engine.nn.fused import fused_gelu, fused_gelu_gradient, fuses

if TYPE_CHECKING:
    from torch.nn import Parameter


class Gelu:
    """``x * cdf(x)`` of the standard normal distribution, or with ``tanh`` the approximation by that function."""

    def __init__(self, *, tanh: bool = False) -> None:
        self.tanh = tanh

    def __call__(self, x: Tensor) -> Tensor:
        """[*] -> [*], by PyTorch."""
        return F.gelu(x, approximate="tanh" if self.tanh else "none")

    def ends(self, x: Tensor, bias: Parameter | None) -> bool:
        """Whether a layer with input x and that ``bias`` lets the kernels compute GeLU of its result."""
        return (
            bias is not None and bias.requires_grad and torch.is_grad_enabled() and fuses(x) and x.dtype == bias.dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """[*, f] -> [*, f], by the kernel."""
        return fused_gelu(x, tanh=self.tanh)

    def gradient(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of x [*, f], and terms [u, f] whose sum is the bias's gradient; by the kernel."""
        return fused_gelu_gradient(grad, x, tanh=self.tanh)
